//! `lab ltp`: the Linux Test Project's tests of system calls, in hosted machines and on a bare machine
//! with the same kernel (an emulated one). Its source is the user's own clone.

mod places;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use mercury_lab::{
    error::{Context, Error, Result},
    hash::Ingredients,
    host, image,
    image::Release,
    live,
    lock::Lock,
    markdown::table,
    paths,
    previrtualization::{self, Flavour},
};
pub use places::{ISOLATIONS, Place};

/// The release whose kernel and programs run.
const RELEASE: Release = Release::Bookworm;
/// The page that explains differences.
const PAGE: &str = include_str!("../../../docs/hosted.md");
/// The list of tests, below the clone.
const LIST: &str = "runtest/syscalls";
/// The disks' label.
const LABEL: &str = "mercury-ltp";
/// The number of tests that one machine runs. The next ones get a fresh machine.
const CHUNK: usize = 250;

/// Builds the tests in the clone, and copies them without symbols, with the libraries that the machine
/// may lack. A test that does not build is missing, and the others run. `$1`: clone, `$2`: tree of the
/// disk, `$3`: the kernel's configuration.
const BUILD: &str = r#"set -e
cd "$1"
[ -x configure ] || make -s autotools
[ -e include/mk/config.mk ] || ./configure -q
make -s -C lib -j2
tests=testcases/kernel/syscalls
for directory in $tests/*/; do
	make -s -k -j2 -C "$directory" || true
done
rm -rf "$2"
mkdir -p "$2/testcases/bin" "$2/lib"
find $tests -type f -executable | while read -r file; do
	strip -o "$2/testcases/bin/${file##*/}" "$file" 2>/dev/null || cp "$file" "$2/testcases/bin"
done
ldd "$2"/testcases/bin/* 2>/dev/null | awk '/=> \// { print $3 }' | sort -u |
	grep -E '/lib(aio|acl|cap|numa|mnl|tirpc|keyutils)\.' | xargs -r cp -L -t "$2/lib"
cp "$3" "$2/config""#;

/// The outcome of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    Passed,
    Failed,
    /// It could not do what it wanted to, crashed, or took too long.
    Broken,
    /// The kernel or its configuration lacks what it is about.
    Skipped,
}

impl Outcome {
    const ALL: [Self; 4] = [Self::Passed, Self::Failed, Self::Broken, Self::Skipped];

    /// Reads an exit status: a set of bits, of which a failure counts most.
    fn of(status: u32) -> Self {
        const LATE_OR_KILLED: u32 = 124;
        match status {
            0 => Self::Passed,
            LATE_OR_KILLED.. => Self::Broken,
            bits if bits & 1 != 0 => Self::Failed,
            bits if bits & 2 != 0 => Self::Broken,
            bits if bits & 32 != 0 => Self::Skipped,
            _ => Self::Failed,
        }
    }
}

/// A request to run tests.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The clone of the Linux Test Project.
    pub source: PathBuf,
    pub places: Vec<Place>,
    /// The names of the tests; all, if empty.
    pub tests: Vec<String>,
}

/// Runs the tests. Results are kept, and those of earlier runs count where a test has not run again. On the
/// bare machine, which is slow, only those tests run that did not pass in all hosted machines. Returns true
/// if docs/hosted.md names all tests that differ.
///
/// # Errors
/// If the tests do not build, or a machine cannot be started.
pub fn run(plan: &Plan) -> Result<bool> {
    let list = plan.source.join(LIST);
    let list = fs::read_to_string(&list).context(|| format!("read {}", list.display()))?;
    let all = chosen(&list, &plan.tests)?;
    // Another run would write the same disks.
    let _lock = Lock::wait("ltp")?;
    let disk = disk(&plan.source)?;
    for place in &plan.places {
        let lines = match place {
            Place::Bare { cpus } => not_passed(&all, *cpus)?,
            Place::Hosted { .. } => all.clone(),
        };
        for (number, chunk) in lines.chunks(CHUNK).enumerate() {
            live::say(&format!("{place}: {} tests from number {} on", chunk.len(), number * CHUNK + 1));
            keep(*place, &place.run(&disk, chunk)?)?;
        }
    }
    compare()
}

/// Returns the lines of tests that have not passed in all hosted machines with so many processors.
fn not_passed<'a>(lines: &[&'a str], cpus: u32) -> Result<Vec<&'a str>> {
    let mut left = BTreeSet::new();
    for isolation in ISOLATIONS {
        let outcomes = outcomes(&kept(Place::Hosted { isolation, cpus })?);
        left.extend(
            outcomes.into_iter().filter(|(_, outcome)| *outcome != Outcome::Passed).map(|(name, _)| name),
        );
    }
    Ok(lines.iter().copied().filter(|line| left.contains(name_of(line))).collect())
}

/// Returns the lines of the list whose tests are named.
fn chosen<'a>(list: &'a str, names: &[String]) -> Result<Vec<&'a str>> {
    let lines = list.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    let lines: Vec<(&str, &str)> = lines.map(|line| (name_of(line), line)).collect();
    let there: BTreeSet<&str> = lines.iter().map(|(name, _)| *name).collect();
    if let Some(missing) = names.iter().find(|name| !there.contains(name.as_str())) {
        return Err(Error::Host(format!("{LIST} has no test {missing}")));
    }
    let is_chosen = |name: &str| names.is_empty() || names.iter().any(|one| one == name);
    Ok(lines.into_iter().filter(|(name, _)| is_chosen(name)).map(|(_, line)| line).collect())
}

fn name_of(line: &str) -> &str {
    line.split_whitespace().next().unwrap_or_default()
}

/// Builds the tests, and puts them on a disk.
fn disk(source: &Path) -> Result<PathBuf> {
    let built = previrtualization::build(RELEASE, Flavour::PreVirtualized)?;
    let source = fs::canonicalize(source).context(|| format!("find {}", source.display()))?;
    let place = paths::lab_dir("ltp")?;
    let name = Ingredients::default().with(source.as_os_str().as_encoded_bytes()).name();
    let (tree, disk) = (place.join(format!("tree-{name}")), place.join(format!("tests-{name}.img")));
    let mut build = std::process::Command::new("sh");
    build.args(["-c", BUILD, "build"]).arg(&source).arg(&tree).arg(built.directory.join(".config"));
    host::run("the Linux Test Project's tests of system calls", "ltp-build", &mut build)?;
    image::make_disk("a disk with them", &tree, &disk, LABEL, "800M")?;
    Ok(disk)
}

/// All that a test said, and its exit status.
type Reports = BTreeMap<String, (u32, String)>;

/// The exit status of a test whose machine has ended meanwhile.
const ENDED: u32 = u32::MAX;

/// Reads the script's output.
fn read(said: &str) -> Reports {
    let mut all = Reports::new();
    let (mut test, mut text) = ("", String::new());
    for line in said.lines() {
        if let Some(status) = line.strip_prefix("== exit ") {
            let status = status.parse().unwrap_or(ENDED);
            all.insert(std::mem::take(&mut test).to_owned(), (status, std::mem::take(&mut text)));
        } else if let Some(name) = line.strip_prefix("== ") {
            (test, text) = (name, String::new());
        } else {
            let _ = writeln!(text, "{line}");
        }
    }
    if !test.is_empty() {
        all.insert(test.to_owned(), (ENDED, text));
    }
    all
}

/// Adds what a machine's tests said to what was kept.
fn keep(place: Place, said: &str) -> Result<()> {
    let mut all = kept(place)?;
    all.extend(read(said));
    let mut text = String::new();
    for (name, (status, said)) in all {
        let _ = write!(text, "== {name}\n{said}== exit {status}\n");
    }
    let path = file_of(place)?;
    fs::write(&path, text).context(|| format!("write {}", path.display()))
}

fn kept(place: Place) -> Result<Reports> {
    Ok(fs::read_to_string(file_of(place)?).map(|text| read(&text)).unwrap_or_default())
}

fn file_of(place: Place) -> Result<PathBuf> {
    Ok(paths::lab_dir("ltp")?.join(format!("{}.txt", place.name())))
}

/// Prints the counts of each hosted machine, and the tests that differ from a bare one. Returns true if the
/// page explains them.
fn compare() -> Result<bool> {
    let (mut rows, mut lines) = (Vec::new(), Vec::new());
    for cpus in [1, 2] {
        let bare = outcomes(&kept(Place::Bare { cpus })?);
        for place in ISOLATIONS.map(|isolation| Place::Hosted { isolation, cpus }) {
            let hosted = outcomes(&kept(place)?);
            let different = differences(&bare, &hosted);
            if !hosted.is_empty() {
                rows.push(row(place, &bare, &hosted, different.len()));
            }
            lines.extend(different.into_iter().map(|line| format!("{place}: {line}")));
        }
    }
    let header =
        ["machine", "passed", "failed", "broken", "skipped", "of the latter three, the same", "different"];
    println!("\n{}\n{}", table(&header, &rows), lines.join("\n"));
    Ok(!lines.iter().any(|line| line.ends_with(UNEXPLAINED)))
}

type Outcomes = BTreeMap<String, Outcome>;

fn outcomes(reports: &Reports) -> Outcomes {
    reports.iter().map(|(name, (status, _))| (name.clone(), Outcome::of(*status))).collect()
}

/// Returns a hosted machine's row of the table: its tests by their outcomes, and how many of those that did
/// not pass ended in the same way on the bare machine.
fn row(place: Place, bare: &Outcomes, hosted: &Outcomes, different: usize) -> Vec<String> {
    let number = |kind| hosted.values().filter(|outcome| **outcome == kind).count();
    let is_same = |(name, outcome): &(&String, &Outcome)| {
        **outcome != Outcome::Passed && bare.get(*name) == Some(*outcome)
    };
    let numbers = Outcome::ALL.map(number).into_iter();
    let numbers = numbers.chain([hosted.iter().filter(is_same).count(), different]);
    std::iter::once(place.to_string()).chain(numbers.map(|number| number.to_string())).collect()
}

/// The end of a line about a test that the page does not name.
const UNEXPLAINED: &str = " (not in docs/hosted.md)";

/// Returns a line for each test whose outcomes differ.
fn differences(bare: &Outcomes, hosted: &Outcomes) -> Vec<String> {
    let pairs = bare.iter().filter_map(|(name, one)| Some((name, one, hosted.get(name)?)));
    let line = |name: &String, one: &Outcome, other: &Outcome| {
        let end = if PAGE.contains(&format!("`{name}`")) { "" } else { UNEXPLAINED };
        format!("{name}: {one:?}, hosted {other:?}{end}")
    };
    pairs.filter(|(_, one, other)| one != other).map(|(name, one, other)| line(name, one, other)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_counts_more_than_what_was_skipped() {
        let statuses = [0, 1, 33, 2, 34, 32, 4, 124, 137, 139];
        use Outcome::{Broken, Failed, Passed, Skipped};
        let expected = [Passed, Failed, Failed, Broken, Broken, Skipped, Failed, Broken, Broken, Broken];
        assert_eq!(statuses.map(Outcome::of), expected);
    }

    #[test]
    fn tests_are_chosen_by_their_names() -> Result<()> {
        let list = "# a comment\n\nfork06 fork_procs -n 1000\nmmap01 mmap01\n";
        assert_eq!(chosen(list, &[])?.len(), 2);
        assert_eq!(chosen(list, &["fork06".into()])?, ["fork06 fork_procs -n 1000"]);
        assert!(chosen(list, &["fork".into()]).is_err());
        Ok(())
    }

    #[test]
    fn a_test_that_ended_its_machine_is_broken() {
        let all = read("== a\nx: TPASS: well\n== exit 0\n== b\n\n== exit 32\n== c\nbegins");
        assert_eq!(outcomes(&all)["c"], Outcome::Broken);
        assert_eq!(all["a"], (0, "x: TPASS: well\n".to_owned()));
        assert_eq!(all["b"].0, 32);
    }

    #[test]
    fn different_outcomes_are_told_and_equal_ones_are_not() {
        let outcomes = |status| outcomes(&read(&format!("== one\n== exit 0\n== other_\n== exit {status}\n")));
        assert!(differences(&outcomes(0), &outcomes(0)).is_empty());
        let told = differences(&outcomes(0), &outcomes(1));
        assert_eq!(told, ["other_: Passed, hosted Failed (not in docs/hosted.md)"]);
    }
}
