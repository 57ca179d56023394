//! Linux's own tests of system calls and of the processor, in a hosted machine and on a bare one with
//! the same kernel and the same programs. They give the same verdicts.

use std::collections::BTreeMap;

use mercury_lab::{Platform, Spec, Vendor, previrtualization::kernel_of, selftests};

use super::*;

/// The script that runs the tests.
const SCRIPT: &str = include_str!("../../guest/hosted/verdicts");
/// The time limit of a test, in seconds. The bare machine is an emulated one.
const LIMIT_S: u32 = 120;
/// The documentation of the differences.
const DOCUMENTATION: &str = include_str!("../../../docs/hosted.md");
/// Time for all tests.
const ALL: Duration = Duration::from_secs(3600);

/// A statement of a test about one of its parts, or its exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Passed,
    Failed,
    Skipped,
}

/// All verdicts, by the test and the part's description without numbers, which differ each time.
type Verdicts = BTreeMap<(String, String), Vec<Verdict>>;

/// Reads a line of a test.
fn verdict(line: &str) -> Option<(Verdict, &str)> {
    let line = line.trim_start_matches(['#', ' ', '\t']);
    const WORDS: [(&str, Verdict); 7] = [
        ("not ok ", Verdict::Failed),
        ("ok ", Verdict::Passed),
        ("[FAIL]", Verdict::Failed),
        ("[OK]", Verdict::Passed),
        ("[PASS]", Verdict::Passed),
        ("[SKIP]", Verdict::Skipped),
        ("[IGNORED]", Verdict::Skipped),
    ];
    let (verdict, rest) =
        WORDS.iter().find_map(|(word, verdict)| Some((*verdict, line.strip_prefix(word)?)))?;
    let is_skipped = rest.to_uppercase().contains("# SKIP");
    Some((if is_skipped { Verdict::Skipped } else { verdict }, rest))
}

/// Returns a description without numbers, and without the reason of a failure.
fn plain(text: &str) -> String {
    let is_number = |word: &str| word.contains(|c: char| c.is_ascii_digit());
    let text = text.split(" # ").next().unwrap_or_default();
    let words = text.split_whitespace().map(|word| if is_number(word) { "#" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

fn read_verdicts(text: &str) -> Verdicts {
    let mut all = Verdicts::new();
    let mut test = String::new();
    for line in text.lines() {
        let (verdict, part) = if let Some(status) = line.strip_prefix("== exit ") {
            let verdict = match status {
                "0" => Verdict::Passed,
                "4" => Verdict::Skipped,
                _ => Verdict::Failed,
            };
            (verdict, "exit status")
        } else if let Some(name) = line.strip_prefix("== ") {
            test = name.to_owned();
            continue;
        } else if let Some(found) = verdict(line) {
            found
        } else {
            continue;
        };
        all.entry((test.clone(), plain(part))).or_default().push(verdict);
    }
    all.values_mut().for_each(|verdicts| verdicts.sort_unstable());
    all
}

/// Returns the number of verdicts of a kind.
fn count(all: &Verdicts, kind: Verdict) -> usize {
    all.values().flatten().filter(|verdict| **verdict == kind).count()
}

/// Returns the tests with different verdicts, and the parts that differ.
fn differences(bare: &Verdicts, hosted: &Verdicts) -> BTreeMap<String, Vec<String>> {
    let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for key in bare.keys().chain(hosted.keys().filter(|key| !bare.contains_key(*key))) {
        let (one, other) = (bare.get(key), hosted.get(key));
        if one != other {
            all.entry(key.0.clone()).or_default().push(format!("{}: {one:?} {other:?}", key.1));
        }
    }
    all
}

/// Returns true if the documentation of hosted machines names the test.
fn is_documented(name: &str) -> bool {
    DOCUMENTATION.contains(&format!("`{name}`"))
}

/// Returns all that the tests say on a bare machine.
fn on_a_bare_machine(image: &Path, cpus: &str, only: &str) -> Result<String> {
    let count = cpus.parse().expect("a number");
    let spec = Spec::new(kernel_of(Release::Bookworm)).cpus(count).memory_mib(1024).own_kernel(image);
    let spec = selftests::programs_arguments()?.iter().fold(spec, |spec, word| spec.qemu_arg(word));
    let machine = mercury_lab::Machine::boot(spec)?;
    machine.put("/root/verdicts", SCRIPT.as_bytes(), 0o755)?;
    machine.sh("mount -o ro /dev/vda /mnt")?;
    let line = format!("unshare -m /root/verdicts /mnt {LIMIT_S} /root/said {only}");
    machine.command(&line).timeout(ALL).run()?.check()?;
    let said = machine.get("/root/said")?;
    machine.shut_down()?;
    Ok(String::from_utf8_lossy(&said).into_owned())
}

/// Mounts, as systemd makes them on the bare machine.
const MOUNTS: &str = "mount -t tmpfs t /run; mkdir -p /dev/pts /dev/shm /dev/mqueue; \
     mount -t devpts -o gid=5,mode=620,ptmxmode=666 d /dev/pts; mount -t tmpfs -o mode=1777 s /dev/shm; \
     mount -t mqueue q /dev/mqueue; mount -t cgroup2 c /sys/fs/cgroup; mount --make-rshared /; \
     ip link set lo up; mount -o ro /dev/vdb /mnt";

/// Returns all that the tests say in a hosted machine.
fn hosted(isolation: &str, cpus: &str, only: &str) -> Result<String> {
    let place = Place::new("verdicts")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    write_to_disk(&place, &disk, SCRIPT.as_bytes(), "/root/verdicts");
    let tests = place.name_for(&selftests::programs()?, "tests.img")?;
    let tests = format!("{},ro", tests.display());
    let options = ["--disk", &tests, isolation, "--cpus", cpus];
    let mut machine = shell_with_memory(&place, &disk, "1024", &options);
    machine.type_line(&format!(
        "{MOUNTS}; unshare -m bash /root/verdicts /mnt {LIMIT_S} /root/said {only}; echo do''ne $?"
    ));
    machine.wait_within(ALL, "done 0\n");
    machine.type_line("mount -o remount,ro /dev/vda /; poweroff -f");
    let log = machine.end(HALTED);
    assert_well(&log);
    Ok(String::from_utf8_lossy(&work::on_disk(&disk, "/root/said")).into_owned())
}

/// Writes a file to an ext4 disk.
fn write_to_disk(place: &Place, disk: &Path, bytes: &[u8], to: &str) {
    let text = place.file("text", bytes);
    let line = format!("write {} {to}", text.display());
    let output = Command::new("debugfs").args(["-w", "-R", &line]).arg(disk).output().expect("debugfs");
    assert!(output.status.success(), "{output:?}");
}

/// Prints the number of verdicts of each kind, and returns the number of passed parts.
fn print_counts(machine: &str, cpus: &str, all: &Verdicts) -> usize {
    let counts = [Verdict::Passed, Verdict::Failed, Verdict::Skipped].map(|kind| count(all, kind));
    println!("{machine}, {cpus} processors: passed, failed and skipped: {counts:?}");
    counts[0]
}

/// Returns the tests whose verdicts differ, and that the documentation does not name. They are
/// repeated on both machines, since some depend on time.
fn unexplained(
    image: &Path,
    bare: &Verdicts,
    (isolation, cpus): (&str, &str),
    only: &str,
) -> Result<Vec<String>> {
    let said = hosted(isolation, cpus, only)?;
    let hosted_ones = read_verdicts(&said);
    print_counts(isolation, cpus, &hosted_ones);
    let different = differences(bare, &hosted_ones);
    println!("different: {different:#?}");
    let names: Vec<_> = different.into_keys().filter(|name| !is_documented(name)).collect();
    if names.is_empty() {
        return Ok(names);
    }
    let only = names.iter().map(|name| name.replace(' ', ":")).collect::<Vec<_>>().join(" ");
    let there = read_verdicts(&on_a_bare_machine(image, cpus, &only)?);
    let said = hosted(isolation, cpus, &only)?;
    let here = read_verdicts(&said);
    let again = [differences(bare, &here), differences(&there, &here)];
    Ok(names.into_iter().filter(|name| again.iter().all(|one| one.contains_key(name))).collect())
}

/// Gives the verdicts of a bare machine with as many processors. The documentation names each test
/// that differs. `MERCURY_VERDICTS` names the tests to run, as in the list, if not all.
fn compare_with_a_bare_machine(cpus: &str) -> Result<()> {
    Platform::need(Vendor::Amd, "this is about a kernel on any bare machine")?;
    let built = previrtualization::build(Release::Bookworm, Flavour::PreVirtualized)?;
    let only = std::env::var("MERCURY_VERDICTS").unwrap_or_default();
    let start = Instant::now();
    let said = on_a_bare_machine(&built.image, cpus, &only)?;
    let bare = read_verdicts(&said);
    let passed = print_counts("bare", cpus, &bare);
    assert!(passed > 1000 || !only.is_empty() && passed > 0, "{said}");
    for isolation in ISOLATIONS {
        let untold = unexplained(&built.image, &bare, (isolation, cpus), &only)?;
        println!("{isolation}, {cpus} processors, compared after {:?}", start.elapsed());
        assert!(untold.is_empty(), "docs/hosted.md does not explain {untold:?}");
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn linux_s_own_tests_say_what_they_say_on_a_bare_machine() -> Result<()> {
    compare_with_a_bare_machine("1")
}

#[test]
#[ignore = "long"]
fn linux_s_own_tests_say_the_same_on_two_processors() -> Result<()> {
    compare_with_a_bare_machine("2")
}

#[test]
fn verdicts_are_read_in_each_form() {
    let text = "== a b\n# ok 1 name of 17\nnot ok 2 other # SKIP no 3\n[FAIL]\tit is bad\n\n== exit 4\n";
    let all: Vec<_> = read_verdicts(text).into_iter().collect();
    let expected = [
        ("# name of #", Verdict::Passed),
        ("# other", Verdict::Skipped),
        ("exit status", Verdict::Skipped),
        ("it is bad", Verdict::Failed),
    ];
    let expected = expected.map(|(part, verdict)| (("a b".to_owned(), part.to_owned()), vec![verdict]));
    assert_eq!(all, expected);
}

#[test]
fn a_lost_verdict_is_a_difference() {
    let [one, other] = ["== a\nok 1 x\nok 2 y\n", "== a\nok 1 x\n"].map(read_verdicts);
    assert_eq!(differences(&one, &one).len(), 0);
    assert_eq!(differences(&one, &other).len(), 1);
    assert_eq!(differences(&other, &one).len(), 1);
}
