"""A script that plays the roles of a parameter-server job without TensorFlow: workers and servers serve on a socket.

It is what `tfdistkit.strategy("parameter_server")` looks like to the launcher: in workers and servers it does not come
back, and ends the process with 0 when the coordinator is gone. The coordinator does what its arguments say.
"""

CAST = """
    import json, os, pathlib, signal, socket, sys, time

    told = json.loads(os.environ["TF_CONFIG"])
    cluster, role, index = told["cluster"], told["task"]["type"], told["task"]["index"]
    attempt = int(os.environ["TFDISTKIT_ATTEMPT"])

    def place(address):
        host, port = address.split(":")
        return host, int(port)

    def serve():
        with socket.create_server(place(cluster[role][index])):
            while True:
                try:
                    coordinator = socket.create_connection(place(cluster["chief"][0]))
                    break
                except ConnectionRefusedError:
                    time.sleep(0.02)
            print("serving", flush=True)
            coordinator.sendall(f"{role} {index} pid {os.getpid()}\\n".encode())
            try:
                coordinator.recv(1)
            except ConnectionResetError:
                pass
        if "stubborn" in sys.argv:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        os._exit(0)

    class Coordinator:
        def __init__(self):
            self.listener = socket.create_server(place(cluster["chief"][0]))
            self.connections = []
            self.pids = {}
            self.meet(len(cluster["worker"]) + len(cluster["ps"]))

        def meet(self, count):
            for _ in range(count):
                connection, _ = self.listener.accept()
                name, _, pid = connection.makefile().readline().rpartition(" pid ")
                self.connections.append(connection)
                self.pids[name] = int(pid)
                print("met", name, flush=True)

        def kill(self, name):
            os.kill(self.pids[name], signal.SIGKILL)

        def wait_for(self, name):
            while not pathlib.Path(name).exists():
                time.sleep(0.02)
"""


def play(coordinator: str, before: str = "") -> str:
    """Returns a script: all serve but the coordinator, which meets them and then runs the given lines as `me`.

    Args:
        coordinator: Lines of the coordinator.
        before: Lines that all roles run first.
    """
    lines = "\n".join(f"        {line}" for line in coordinator.splitlines())
    start = "\n".join(f"    {line}" for line in before.splitlines())
    roles = '    if role != "chief":\n        serve()\n    else:\n        me = Coordinator()'
    return f"{CAST}\n{start}\n{roles}\n{lines}\n"
