"""Run many launches that must fail, each in a fork of one process that has SGLang imported already.

Reads a JSON list of argument lists on standard input; writes a JSON list of [exit code, output] to the file given
as argument. Every child runs ``python -m sglang.launch_server`` as it is, through runpy.
"""

import json
import os
import runpy
import sys
import tempfile

from sglang.srt.plugins import load_plugins

load_plugins()
import sglang.srt.entrypoints.http_server  # noqa: E402, F401  the heavy import, shared by all children

TIMEOUT_S = 120


def launch(arguments: list[str]) -> tuple[int, str]:
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.argv = ["launch_server.py", *arguments]
            code = 0
            try:
                runpy.run_module("sglang.launch_server", run_name="__main__")
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", flush=True)
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def main() -> None:
    results = [launch(arguments) for arguments in json.load(sys.stdin)]
    with open(sys.argv[1], "w") as sink:
        json.dump(results, sink)


if __name__ == "__main__":
    main()
