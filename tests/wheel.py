"""The packages, built, checked and installed into an empty environment: ``make wheel``.

The source distribution is built from the checkout, the wheel from the source distribution. The environment has torch
and what torch requires as hard links to the files of this one, which spares gigabytes; all else is installed by pip.
README's first example, its commands and what it does with their file run there, in a folder with a copy of the config,
from which the checkout cannot be imported.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.markers import default_environment
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

import lightning_nm
from lightning_nm.kernels.cpu import build

ROOT = Path(__file__).parent.parent
NEEDED = {
    "lightning_nm/py.typed",
}
EXAMPLE = """
import contextlib
import io

import lightning.pytorch as pl
import lightning_nm
from lightning_nm.cli import main
from lightning_nm.demo import GPT, HelpTopics
from lightning_nm.functional import is_nm
from lightning_nm.kernels.cpu import library

assert lightning_nm.__version__ == {version!r}
assert {place!r} in lightning_nm.__file__, lightning_nm.__file__
assert not {library} or library.load()


class Short(pl.Trainer):
    def __init__(self, **options):
        super().__init__(**options, max_steps=3, logger=False, accelerator="cpu", enable_progress_bar=False)


pl.Trainer, Trainer = Short, pl.Trainer
model, data = GPT(context=64, dim=64, heads=4), HelpTopics()
{code}
assert is_nm(model.blocks[0].qkv.weight, "2:4")
trainer.save_checkpoint("model.ckpt")


def said(status, *words):
    texts = io.StringIO()
    with contextlib.redirect_stdout(texts), contextlib.redirect_stderr(texts):
        assert main(words) == status, texts.getvalue()
    return texts.getvalue()


assert said(0, "--version") == "lightning-nm {version}\\n"
assert "OK" in said(0, "verify", "model.ckpt")
assert not {library} or "cpu-permute  yes" in said(0, "doctor")
assert "pip install -e '.[cli]'" in said(2, "fit")
"""


def run(*words, cwd=None):
    """The output of a command; if it fails, the error shows it."""
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")
    }
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(
            f"{' '.join(map(str, words))}: status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        )
    return done.stdout + done.stderr


def check_source(path, version):
    """The name, and that the source distribution holds what the wheel is built from and the documents."""
    assert parse_sdist_filename(path.name) == ("lightning-nm", version)
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {
        "hatch_build.py",
        "lightning_nm/kernels/cpu/csrc/kernels.c",
        "LICENSE",
        "SECURITY.md",
        "tests/wheel.py",
    }
    assert names >= needed, needed - names
    strange = [
        name
        for name in names
        if name.endswith((".so", ".pyc", ".ckpt")) and not name.startswith("tests/legacy")
    ]
    assert not strange, strange


def check_wheel(path, version):
    """The name, the tag, the files and the metadata of the wheel."""
    name, number, _, tags = parse_wheel_filename(path.name)
    assert (name, number) == ("lightning-nm", version)
    with zipfile.ZipFile(path) as archive:
        names, folder = set(archive.namelist()), f"lightning_nm-{version}.dist-info"
        text, written = (
            archive.read(f"{folder}/{file}").decode() for file in ("METADATA", "WHEEL")
        )
    assert names >= NEEDED | {f"{folder}/licenses/LICENSE"}, NEEDED - names
    sources = {str(file.relative_to(ROOT)) for file in (ROOT / "lightning_nm").rglob("*.py")}
    assert sources <= names, sources - names
    assert not {name for name in names if not name.startswith(("lightning_nm/", folder))}
    compiled = f"{build.LIBRARY.relative_to(ROOT)}" in names
    assert compiled == bool(build.compiler()), "the library is there where there is a compiler"
    (tag,) = tags
    assert (tag.interpreter, tag.abi, tag.platform != "any") == ("py3", "none", compiled), tag
    assert f"Tag: {tag}" in written
    assert f"Root-Is-Purelib: {str(not compiled).lower()}" in written
    metadata = Metadata.from_email(text, validate=True)
    assert metadata.license_expression == "Apache-2.0"
    assert str(metadata.requires_python) == ">=3.10"
    assert metadata.description_content_type == "text/markdown"
    assert Parser().parsestr(text).get_payload().startswith("# lightning_nm")
    return compiled


def closure(name, known):
    """The distributions that one requires here, itself included."""
    if name not in known:
        known[name] = found = distribution(name)
        environment = {**default_environment(), "extra": ""}
        for requirement in map(Requirement, found.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate(environment):
                closure(canonicalize_name(requirement.name), known)
    return known.values()


def link(found: Distribution, site):
    """Give an environment the files of a distribution."""
    for file in found.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file.locate(), target)
            except OSError:  # another file system
                shutil.copy2(file.locate(), target)


def main():
    version = lightning_nm.__version__
    folder = ROOT / "build" / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    check_source(source, parse_sdist_filename(source.name)[1])
    compiled = check_wheel(wheel, parse_wheel_filename(wheel.name)[1])
    assert parse_wheel_filename(wheel.name)[1] == parse_sdist_filename(source.name)[1]
    print(
        f"{wheel.name}: {wheel.stat().st_size // 1024} KiB; {source.name}: {source.stat().st_size // 1024} KiB"
    )

    empty = folder / "empty"
    run(sys.executable, "-m", "venv", empty)
    python = empty / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip())
    for found in closure("torch", {}):
        link(found, site)
    pip = (
        python,
        "-m",
        "pip",
        "install",
        "--no-compile",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints.txt",
    )
    run(*pip, wheel)
    run(python, "-m", "pip", "check")

    with tempfile.TemporaryDirectory() as away:
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        codes = re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S)
        code = next(block for block in codes if "Trainer" in block)
        served = next(block for block in codes if "load_packed" in block)
        commands = re.findall(r"^lightning-nm (?:fit|export) .*$", readme, re.M)
        assert len(commands) == 2, commands
        script = Path(away) / "example.py"
        script.write_text(
            EXAMPLE.format(version=version, place=str(site), library=compiled, code=code)
        )
        run(python, script, cwd=away)
        run(*pip, f"lightning-nm[cli] @ {wheel.as_uri()}")
        run(python, "-m", "pip", "check")
        # The logger of the config needs tensorboard.
        run(*pip, f"lightning-nm[tensorboard] @ {wheel.as_uri()}")
        (Path(away) / "configs").mkdir()
        shutil.copy(ROOT / "configs" / "speed-asp.yaml", Path(away) / "configs")
        fit, export = (shlex.split(command, comments=True) for command in commands)
        scripts = empty / "bin"
        run(
            scripts / fit[0],
            *fit[1:],
            "--trainer.max_steps=3",
            "--trainer.val_check_interval=3",
            cwd=away,
        )
        expanded = [
            found for word in export[1:] for found in sorted(Path(away).glob(word)) or [word]
        ]
        run(scripts / export[0], *expanded, cwd=away)
        run(python, "-c", served, cwd=away)
    shutil.rmtree(empty)
    print(
        "installed into an empty environment: README's examples, and version, verify, doctor, fit and export"
    )


if __name__ == "__main__":
    main()
