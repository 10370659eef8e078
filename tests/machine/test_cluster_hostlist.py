import itertools
import shutil
import subprocess

import hypothesis
import hypothesis.strategies as st
import pytest

from launcher.machine.cluster import slurm


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("a,b", "a b"),
        ("n[9-10,12],gpu-[01-03]-ib", "n9 n10 n12 gpu-01-ib gpu-02-ib gpu-03-ib"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[09-11]", "n09 n10 n11"),
        ("n[099-101]", "n099 n100 n101"),
        ("n[0-2]", "n0 n1 n2"),
        ("n[00-1]", "n00 n01"),
        ("n[3,1-2,01]", "n3 n1 n2 n01"),
        ("b2,a[1-2],b1", "b2 a1 a2 b1"),
        ("a[1-2]b[3-4]", "a1b3 a1b4 a2b3 a2b4"),
        ("a[1-2][3-4]", "a13 a14 a23 a24"),
        ("a[1-2][3-4][5-6]", "a135 a136 a235 a236 a145 a146 a245 a246"),
        ("10.0.0.[1-3]", "10.0.0.1 10.0.0.2 10.0.0.3"),
        ("[1-2]", "1 2"),
        ("n[1,1]", "n1 n1"),
        ("a,,b", "a b"),
        (" a, b ", "a b"),
        ("", ""),
    ],
)
def test_a_list_is_written_out_in_its_own_order(text, hosts):
    assert " ".join(slurm.expand(text)) == hosts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("n[]", "'' is not a number"),
        ("n[1-]", "'1-' is not a number"),
        ("n[-1]", "'-1' is not a number"),
        ("n[1x]", "'1x' is not a number"),
        ("n[1-2-3]", "'1-2-3' is not a number"),
        ("n[1,]", "'' is not a number"),
        ("n[ 1]", "' 1' is not a number"),
        ("n[٣]", "'٣' is not a number"),
        ("n[3-1]", "'3-1' runs backwards"),
        ("n[1", "'n[1' is not a host name"),
        ("n1]", "'n1]' is not a host name"),
        ("n[[1]]", "is not a host name"),
        ("a b", "'a b' is not a host name"),
        ("n;reboot", "is not a host name"),
        ("n[0-65536]", "more than 65536 hosts"),
        ("n[0-999999999999999999]", "more than 65536 hosts"),
        ("a[1-999][1-999]b[1-9]", "more than 65536 hosts"),
        ("n[1-65536],m", "more than 65536 hosts"),
    ],
)
def test_what_is_no_list_is_refused_with_the_part_that_is_not(text, says):
    with pytest.raises(ValueError) as caught:
        slurm.expand(text)
    assert says in str(caught.value)


def test_a_list_may_have_as_many_hosts_as_slurm_allows():
    assert len(slurm.expand(f"n[1-{slurm.MAX_HOSTS}]")) == 65536


# ------------------------------------------------------------------------------------------------ against other readers


@st.composite
def _ranges(draw):
    """A bracket's text, and what it stands for, written out number by number."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, 120))
        written = str(first).zfill(draw(st.integers(1, 4)))
        last = first + draw(st.integers(0, 12))
        texts.append(written if last == first else f"{written}-{last}")
        numbers += [str(number).zfill(len(written)) for number in range(first, last + 1)]
    return f"[{','.join(texts)}]", numbers


_LETTERS = st.text("abxyz-.", min_size=1, max_size=4).map(lambda text: f"n{text}q")


@st.composite
def _hostlists(draw, *, most_sets=3, suffix=True):
    texts, hosts = [], []
    for _ in range(draw(st.integers(1, 3))):
        text, sets = "", []
        for _ in range(draw(st.integers(0, most_sets))):
            prefix, (ranges, numbers) = draw(_LETTERS), draw(_ranges())
            text += prefix + ranges
            sets.append([prefix + number for number in numbers])
        end = draw(_LETTERS) if suffix or not sets else ""
        texts.append(text + end)
        # The first of them counts faster than the second, and so on; the last faster than all.
        slower = [choice[::-1] for choice in itertools.product(*sets[:-1][::-1])]
        hosts += ["".join([*choice, last, end]) for choice in slower for last in (sets[-1] if sets else [""])]
    hypothesis.assume(len(hosts) < 2000)
    return ",".join(texts), hosts


@hypothesis.given(_hostlists())
def test_every_list_that_can_be_written_is_read_as_a_brute_force_writes_it_out(case):
    text, hosts = case
    assert list(slurm.expand(text)) == hosts


@hypothesis.given(st.text("n0123456789-[],. x", max_size=30))
def test_any_text_is_a_list_or_a_value_error(text):
    try:
        hosts = slurm.expand(text)
    except ValueError:
        return
    assert all(host and not set(host) & set("[], ") for host in hosts)


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory):
    """Asks the real scontrol, which needs a configuration and no cluster."""
    program = shutil.which("scontrol")
    if program is None:
        pytest.skip("no scontrol here; Debian's slurm-client has it")
    config = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    config.write_text("ClusterName=test\nSlurmctldHost=localhost\n")

    def ask(what, names):
        done = subprocess.run(
            [program, "show", what, names],
            env={"SLURM_CONF": str(config)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout.split()

    if ask("hostnames", "n[1-2]") != ["n1", "n2"]:
        pytest.skip("this scontrol does not work without a cluster")
    return ask


# Slurm 22.05 reads no suffix after a set.
@hypothesis.settings(max_examples=40)
@hypothesis.given(case=_hostlists(suffix=False))
def test_scontrol_reads_a_list_the_same_way(scontrol, case):
    assert list(slurm.expand(case[0])) == scontrol("hostnames", case[0])


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    names=st.lists(
        st.tuples(st.sampled_from(["n", "gpu-", "rack2-"]), st.integers(0, 30), st.integers(1, 3)),
        min_size=1,
        max_size=25,
        unique=True,
    )
)
def test_what_scontrol_shortens_is_read_back(scontrol, names):
    hosts = [f"{prefix}{number:0{width}d}" for prefix, number, width in names]
    (short,) = scontrol("hostlist", ",".join(hosts))
    assert sorted(slurm.expand(short)) == sorted(hosts)
    assert list(slurm.expand(short)) == scontrol("hostnames", short)
