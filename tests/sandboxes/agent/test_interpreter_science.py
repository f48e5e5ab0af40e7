"""Figures, rich display and IPython, with the real packages in an environment that has them."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import ENVIRONMENTS

from .interpreter_process import InterpreterProcess

PNG = b"\x89PNG\r\n\x1a\n"


pytestmark = pytest.mark.science


@pytest.fixture(scope="module")
def executable() -> str:
    return str(ENVIRONMENTS["science"].python)


@pytest.fixture
def python(executable: str, tmp_path: Path) -> Iterator[InterpreterProcess]:
    with InterpreterProcess(tmp_path, executable) as process:
        process.run("x = 41")
        yield process


def images(answer: dict[str, Any]) -> list[str]:
    """The names of an answer's images, each checked to be a PNG file."""
    for image in answer["images"]:
        assert image["mime"] == "image/png"
        assert Path(image["path"]).read_bytes().startswith(PNG)
    return [Path(image["path"]).name for image in answer["images"]]


def loaded(python: InterpreterProcess, name: str) -> bool:
    return bool(python.run(f"import sys; {name!r} in sys.modules")["value"] == "True")


def test_ipython_and_matplotlib_are_not_loaded_before_they_are_needed(python: InterpreterProcess) -> None:
    python.run("import numpy, pandas\ns = '''\n%timeit x\n!ls\ndisplay(x)\n'''\npandas.DataFrame({'a': [1]})")
    python.run("text = '''\n%time\n'''\nx = = 1")
    assert not loaded(python, "IPython")
    assert not loaded(python, "matplotlib")


def test_open_figures_are_saved_at_the_end_of_the_cell_and_closed(python: InterpreterProcess) -> None:
    answer = python.run("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.figure()\nplt.plot([3])\nNone")
    assert images(answer) == ["figure-2-1.png", "figure-2-2.png"]
    assert python.run("plt.get_fignums()")["value"] == "[]"


def test_show_saves_at_that_point_and_warns_of_nothing(python: InterpreterProcess) -> None:
    answer = python.run(
        "from matplotlib.pyplot import plot, show\n"
        "import os\nplot([1])\nshow()\nprint(os.listdir('.outputs'))\nplot([2]);"
    )
    assert answer["output"] == "['figure-2-1.png']\n"
    assert images(answer) == ["figure-2-1.png", "figure-2-2.png"]


def test_figures_own_show_warns_of_nothing(python: InterpreterProcess) -> None:
    answer = python.run("import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nfig.show()")
    assert (answer["outcome"], answer["output"]) == ("ok", "")
    assert images(answer) == ["figure-2-1.png"]


def test_figure_as_the_value_is_shown_once_and_again_when_asked_again(python: InterpreterProcess) -> None:
    answer = python.run("import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.plot([1])\nfig")
    assert images(answer) == ["figure-2-1.png"]
    assert answer["value"] == "<Figure size 640x480 with 1 Axes>"
    assert images(python.run("fig")) == ["figure-3-1.png"]


def test_figure_of_a_cell_that_raises_is_still_shown(python: InterpreterProcess) -> None:
    answer = python.run("import matplotlib.pyplot as plt\nplt.plot([1])\n1 / 0")
    assert answer["outcome"] == "raised"
    assert images(answer) == ["figure-2-1.png"]


def test_figure_that_cannot_be_drawn_is_a_note_and_is_closed(python: InterpreterProcess) -> None:
    answer = python.run("import matplotlib.pyplot as plt\nplt.title('$\\\\frac{$')\nNone")
    assert answer["outcome"] == "ok"
    assert "the figure cannot be drawn" in answer["note"]
    assert python.run("plt.get_fignums()")["value"] == "[]"


def test_loop_of_figures_saves_fifty_and_counts_the_rest(python: InterpreterProcess) -> None:
    code = """import warnings
warnings.simplefilter('ignore')
class P:
    def _repr_png_(self): return b'\\x89PNG\\r\\n\\x1a\\n'
for _ in range(60): display(P())"""
    answer = python.run(code)
    assert len(images(answer)) == 50
    assert "10 images were not saved" in answer["note"]


def test_inline_backend_magic_changes_nothing(python: InterpreterProcess) -> None:
    answer = python.run("%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1]);")
    assert (answer["outcome"], answer["output"]) == ("ok", "")
    assert images(answer) == ["figure-2-1.png"]


def test_pillow_image_as_the_value_is_saved(python: InterpreterProcess) -> None:
    answer = python.run("from PIL import Image\nImage.new('RGB', (5, 5))")
    assert images(answer) == ["figure-2-1.png"]
    assert answer["value"].startswith("<PIL.Image.Image")


def test_display_saves_images_and_shows_text_in_order(python: InterpreterProcess) -> None:
    code = """from PIL import Image
import pandas
print('before')
display(pandas.DataFrame({'a': [1]}), Image.new('RGB', (5, 5)), 'text')
print('after')"""
    answer = python.run(code)
    assert answer["output"] == "before\n   a\n0  1\n'text'\nafter\n"
    assert images(answer) == ["figure-2-1.png"]


def test_display_works_in_functions_and_later_cells(python: InterpreterProcess) -> None:
    python.run("def show(value):\n    display(value)")
    assert python.run("show(x)")["output"] == "41\n"


def test_markdown_latex_and_html_are_shown_as_their_text(python: InterpreterProcess) -> None:
    code = """from IPython.display import HTML, Latex, Markdown
display(Markdown('**bold**'), Latex('$a$'), HTML('<b>b &lt; c</b><script>x</script>'))
Markdown('# last')"""
    answer = python.run(code)
    assert answer["output"] == "**bold**\n$a$\nb < c\n"
    assert answer["value"] == "# last"


def test_image_of_a_mimebundle_is_saved(python: InterpreterProcess) -> None:
    code = """import base64, io
from IPython.display import Image as Shown
from PIL import Image
buffer = io.BytesIO()
Image.new('RGB', (2, 2)).save(buffer, 'png')
class Bundle:
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {'image/png': base64.b64encode(buffer.getvalue()).decode()}
display(Shown(buffer.getvalue()))
Bundle()"""
    assert images(python.run(code)) == ["figure-2-1.png", "figure-2-2.png"]


def test_shell_lines_run_in_order_with_variables_and_exit_code(python: InterpreterProcess) -> None:
    answer = python.run("print('first')\n!echo {x + 1} $x; exit 3\nprint('last', _exit_code)")
    assert answer["output"] == "first\n42 41\nlast 3\n"
    assert python.run("lines = !printf 'a\\nb'\nlist(lines)")["value"] == "['a', 'b']"


def test_magics_run(python: InterpreterProcess) -> None:
    assert "per loop" in python.run("%timeit -n1 -r1 x")["output"]
    assert python.run("%%bash\necho from bash")["output"] == "from bash\n"
    answer = python.run("%%time\nx + 1")
    assert answer["value"] == "42"
    assert "Wall time" in answer["output"]
    python.run("%%capture caught\nprint('quiet')")
    assert python.run("caught.stdout")["value"] == "'quiet\\n'"
    assert python.run("%%writefile made.py\ny = 5")["outcome"] == "ok"
    assert python.run("%run made.py\ny")["value"] == "5"
    assert python.run("await __import__('asyncio').sleep(0)\n%env HOME=/tmp\nx")["value"] == "41"


def test_help_on_an_object_is_printed_without_a_pager(python: InterpreterProcess) -> None:
    python.run("def area(r):\n    'The area.'\n    return r")
    output = python.run("area?")["output"]
    assert "Signature: area(r)" in output
    assert "The area." in output
    assert "return r" in python.run("area??")["output"]
    assert "\x1b" not in output


def test_traceback_of_a_cell_with_magics_shows_the_lines_as_typed(python: InterpreterProcess) -> None:
    answer = python.run("!true\ny = x\n1 / 0")
    assert answer["outcome"] == "raised"
    assert answer["error"].startswith(
        'Traceback (most recent call last):\n  File "<cell 2>", line 3, in <module>\n    1 / 0'
    )


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("%timeit -n1 1 / 0", "ZeroDivisionError: division by zero"),
        ("%%time\n1 / 0", "ZeroDivisionError: division by zero"),
        ("%%capture\n1 / 0", "ZeroDivisionError: division by zero"),
        ("%nosuch", "Line magic function `%nosuch` not found."),
        ("!true\nx = = 1", "SyntaxError: invalid syntax"),
    ],
)
def test_error_in_a_magic_is_the_cells_error_with_no_frame_of_ipython(
    python: InterpreterProcess, code: str, last: str
) -> None:
    answer = python.run(code)
    assert answer["outcome"] == "raised"
    assert last in answer["error"].splitlines()[-1]
    assert "site-packages/IPython" not in answer["error"]
    assert python.run("x + 1")["value"] == "42"


def test_shell_line_is_interrupted_and_its_process_ended(python: InterpreterProcess) -> None:
    number = python.send("!echo GO; exec sleep 1000")
    python.output_until("GO")
    python.interrupt()
    assert python.result(number)["outcome"] == "interrupted"
    assert python.run("x + 1")["value"] == "42"


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("%%time\nprint('GO')\nwhile True: pass", "interrupted"),
        ("%timeit -n1 -r1 print('GO', flush=True) or __import__('time').sleep(1e6)", "interrupted"),
        # IPython ends the shell itself and then raises CalledProcessError.
        ("%%bash\necho GO\nsleep 1000", "raised"),
    ],
)
def test_interrupt_ends_a_magic(python: InterpreterProcess, code: str, outcome: str) -> None:
    number = python.send(code)
    python.output_until("GO")
    python.interrupt()
    assert python.result(number)["outcome"] == outcome
    assert python.run("x + 1")["value"] == "42"


def test_pip_installs_into_the_site_directory(python: InterpreterProcess) -> None:
    project = python.directory / "tiny"
    project.mkdir()
    wheel = make_wheel(project)
    answer = python.run(f"%pip install --no-index {wheel}\nimport tiny\ntiny.answer")
    assert answer["value"] == "42", answer
    assert (python.site / "tiny.py").exists()


@pytest.mark.parametrize("code", ["%pip install no-such-package", "!python -m pip install --retries 0 no-such-package"])
def test_pip_without_network_says_so_in_plain_words(executable: str, tmp_path: Path, code: str) -> None:
    offline = ("unshare", "--map-root-user", "--net")
    if subprocess.run([*offline, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let tests make a network namespace")
    with InterpreterProcess(tmp_path, executable, prefix=offline) as python:
        output = python.run(code.replace("python", executable))["output"]
        assert "This sandbox has no network access" in output
        assert python.run("5")["value"] == "5"


def test_loading_ipython_leaves_the_namespace_clean(python: InterpreterProcess) -> None:
    python.run("%cd .")
    assert python.run("[name for name in dir() if not name.startswith('_')]")["value"] == "['get_ipython', 'x']"
    assert python.run("exit()")["outcome"] == "exited"
    assert python.run("open('f', 'w').write('ab')")["value"] == "2"


def test_ipython_keeps_nothing_of_what_the_engine_gives(python: InterpreterProcess) -> None:
    python.run("%cd .")
    python.run("def f():\n    return 1 / 0")
    error = python.run("f()")["error"]
    assert 'File "<cell 3>", line 2, in f\n    return 1 / 0' in error
    assert python.run("print('heard')\n{'b': 1, 'a': 2}")["value"] == "{'b': 1, 'a': 2}"
    assert python.run("_['a']")["value"] == "2"


def make_wheel(directory: Path) -> Path:
    """A wheel with one module, written by hand: no build tool needed."""
    wheel = directory / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "answer = 42")
        archive.writestr("tiny-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n")
        archive.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.dist-info/RECORD", "")
    return wheel
