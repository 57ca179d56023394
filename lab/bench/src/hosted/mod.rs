//! `lab bench hosted`: the cost of a hosted kernel for its programs. The same programs run
//! natively, in a hosted kernel and in the systems like it, one after the other in each round, all
//! on the same processor of this host.

mod peers;
mod report;
mod ways;
mod work;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use mercury_initramfs::Archive;
use serde::Serialize;
use serde_json::Value;

use super::stats;
use mercury_lab::{
    error::{Context, Error, Result},
    host,
    image::{Image, Release},
    live, paths, progress,
};
pub use report::{HEADING, headline_keys, headlines, section};
use ways::{Files, Job, Programs, Way};
use work::Done;

/// Returns the disk with a release's programs, a kernel's source, and the objects that a part of
/// that kernel needs. The disk is made first if it is missing.
///
/// # Errors
/// If a package cannot be fetched or a program does not build.
pub(super) fn work_disk(release: Release) -> Result<PathBuf> {
    match work::job(release)?.files {
        Files::Disk(disk) => Ok(disk),
        Files::Archive(archive) => Err(Error::Host(format!("{} is no disk", archive.display()))),
    }
}

/// The benchmarks, by the names of `mercury bench os` and of the work, with the operation of each.
const BENCHMARKS: &[(&str, &str)] = &[
    ("null-call", "system call (getppid)"),
    ("page-fault", "page fault"),
    ("protection-fault", "signal for a write to a read-only page"),
    ("mmap", "mmap of a file, some pages read, munmap"),
    ("fork", "fork, exit, wait"),
    ("exec", "fork, exec, exit, wait"),
    ("sh", "fork, sh -c, exit, wait"),
    ("pipe", "message through a pipe to another process"),
    ("ctx-2p-0k", "switch between two processes"),
    ("ctx-16p-16k", "switch among 16 processes of 16 KiB"),
    ("ctx-16p-64k", "switch among 16 processes of 64 KiB"),
    (work::POSTGRES, "PostgreSQL: a transaction (pgbench)"),
    (work::BUILD, "build of a part of a kernel"),
];

const MEMORY_MIB: u32 = 512;
const LIMIT_S: u32 = 300;
const INIT: &str = "#!/bin/sh\nexec </dev/null 2>/dev/null\n/bin/mercury --json bench os --samples 5\n";

/// Programs from Debian's image, beneath `usr`.
const FILES: &[(&str, &str)] = &[
    ("bin/sh", "bin/dash"),
    ("bin/true", "bin/true"),
    ("lib/x86_64-linux-gnu/libc.so.6", "lib/x86_64-linux-gnu/libc.so.6"),
    ("lib/x86_64-linux-gnu/libm.so.6", "lib/x86_64-linux-gnu/libm.so.6"),
    ("lib/x86_64-linux-gnu/libgcc_s.so.1", "lib/x86_64-linux-gnu/libgcc_s.so.1"),
    ("lib64/ld-linux-x86-64.so.2", "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"),
];

/// The number of measurements of each way.
#[derive(Clone, Copy, Debug)]
pub struct Rounds {
    /// Rounds of `mercury bench os`.
    pub small: u32,
    /// Rounds of work.
    pub work: u32,
}

#[derive(Clone, Debug, Serialize)]
pub struct Hosted {
    /// The version of this host's kernel.
    pub host: String,
    /// The version of the kernel that is hosted and emulated.
    pub kernel: String,
    /// The version of User Mode Linux's kernel.
    pub uml: String,
    /// The version of the User Mode Linux with seccomp.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uml_seccomp: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gvisor: Option<String>,
    /// The number of rounds of `mercury bench os`.
    pub rounds: u32,
    /// The number of rounds of work.
    pub rounds_of_work: u32,
    /// Measurements that failed, with the reasons.
    pub left_out: Vec<String>,
    /// The benchmarks, in the order of the table.
    pub benchmarks: Vec<Row>,
}

/// One benchmark, with the medians of all rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub name: String,
    /// By [`Way::key`]: microseconds natively, and ratios to those.
    #[serde(flatten)]
    pub ways: BTreeMap<&'static str, f64>,
}

/// The microseconds of all rounds.
type Costs = BTreeMap<(Way, String), Vec<f64>>;

/// Measurements that are left out, with the reasons.
type LeftOut = BTreeMap<(Way, Load), String>;

/// Measures in so many rounds.
///
/// # Errors
/// If a part of the project does not build or run, or Debian's User Mode Linux is not installed.
pub fn measure(release: Release, rounds: Rounds) -> Result<Hosted> {
    let peers = peers::find(release)?;
    let mut programs = Programs::build(release)?;
    let dir = paths::lab_dir("bench")?.join("hosted");
    let small = small(release, &programs.mercury, &dir)?;
    let work = work::job(release)?;
    host::remove_tree(&dir.join("uml"))?;
    let mut bench =
        Bench { dir, costs: BTreeMap::new(), left_out: BTreeMap::new(), objects: BTreeSet::new() };
    programs.uml_seccomp = bench.had(Way::UmlSeccomp, peers.uml_seccomp);
    programs.gvisor = bench.had(Way::Gvisor, peers.gvisor);
    for round in 1..=rounds.small {
        live::say(&format!("Native, hosted and the other ways: round {round} of {}", rounds.small));
        bench.round(&programs, Load::Small, &small, &Way::ALL, round == 1)?;
    }
    for round in 1..=rounds.work {
        live::say(&format!("PostgreSQL and a build in the same ways: round {round} of {}", rounds.work));
        let ways: Vec<Way> = AT_WORK.into_iter().filter(|way| round == 1 || *way != Way::Emulated).collect();
        bench.round(&programs, Load::Work, &work, &ways, round == 1)?;
    }
    let rows = BENCHMARKS.iter().map(|(name, _)| Row::new(name, &bench.costs));
    Ok(Hosted {
        host: line(Command::new("uname").arg("-r"))?.split('-').next().unwrap_or_default().to_owned(),
        kernel: release.to_string(),
        uml: line(Command::new(peers::UML).arg("--version"))?,
        uml_seccomp: version(programs.uml_seccomp.as_ref())?,
        gvisor: version(programs.gvisor.as_ref())?,
        rounds: rounds.small,
        rounds_of_work: rounds.work,
        left_out: bench
            .left_out
            .iter()
            .map(|((way, load), why)| format!("{}: {why}", load.of(*way)))
            .collect(),
        benchmarks: rows.collect::<Result<_>>()?,
    })
}

/// The load of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Load {
    Small,
    /// PostgreSQL and a build.
    Work,
}

/// Ways that are measured at work: all but one, since signals in place of system calls are no way
/// to work. The emulated machine, which takes thirty times as long as a processor, does the work
/// once.
const AT_WORK: [Way; 7] =
    [Way::Native, Way::Hosted, Way::HostedIsolated, Way::Uml, Way::UmlSeccomp, Way::Gvisor, Way::Emulated];

impl Load {
    /// Returns the words for a way with this load.
    fn of(self, way: Way) -> String {
        match self {
            Self::Small => way.heading().to_owned(),
            Self::Work => format!("{} at work", way.heading()),
        }
    }
}

/// The measurements so far.
struct Bench {
    dir: PathBuf,
    costs: Costs,
    left_out: LeftOut,
    /// Hashes of the objects that the work has built.
    objects: BTreeSet<String>,
}

impl Bench {
    /// Returns a program, or notes the reason for which it is missing.
    fn had(&mut self, way: Way, program: Result<PathBuf>) -> Option<PathBuf> {
        program.map_err(|error| self.leave_out(Load::Small, way, &error)).ok()
    }

    fn leave_out(&mut self, load: Load, way: Way, error: &Error) {
        println!("    without {}: {error}", load.of(way));
        // The log's path is of no use to the page's readers.
        let why = match error {
            Error::Program { what, status, .. } => format!("{what} failed ({status})"),
            other => other.to_string().lines().next().unwrap_or_default().to_owned(),
        };
        self.left_out.insert((way, load), why);
    }

    /// Returns true if a way is left out. A way that fails at single operations is not given work.
    fn is_left_out(&self, load: Load, way: Way) -> bool {
        [Load::Small, load].iter().any(|load| self.left_out.contains_key(&(way, *load)))
    }

    /// Measures each way once. A system of others that fails in the first round is left out, by
    /// name.
    fn round(&mut self, programs: &Programs, load: Load, job: &Job, ways: &[Way], first: bool) -> Result<()> {
        for way in ways.iter().copied() {
            if self.is_left_out(load, way) {
                continue;
            }
            let output = progress::step(&load.of(way), || programs.run(way, job, &self.dir));
            let measured = output.and_then(|output| read(load, &output));
            match measured {
                Ok(Done { costs, objects }) => {
                    self.objects.extend(objects);
                    self.same_objects(way)?;
                    for (name, us) in costs {
                        self.costs.entry((way, name)).or_default().push(us);
                    }
                }
                Err(error) if first && way.may_be_left_out() => self.leave_out(load, way, &error),
                Err(error) => return Err(Error::Host(format!("{}: {error}", load.of(way)))),
            }
        }
        Ok(())
    }

    /// Checks that the work has built the same objects: a fast and wrong result does not count.
    fn same_objects(&self, way: Way) -> Result<()> {
        if self.objects.len() <= 1 {
            return Ok(());
        }
        Err(Error::Unhealthy(format!("{} has built other objects than the native build", way.heading())))
    }
}

/// Reads the output of a way.
fn read(load: Load, output: &Output) -> Result<Done> {
    let text = String::from_utf8_lossy(&output.stdout);
    if load == Load::Work {
        return work::done(&text);
    }
    let costs = costs(&text).ok_or_else(|| {
        let errors = String::from_utf8_lossy(&output.stderr);
        Error::Host(format!("the program has measured nothing ({}): {text}{errors}", output.status))
    })?;
    Ok(Done { costs, objects: None })
}

impl Row {
    fn new(name: &str, costs: &Costs) -> Result<Self> {
        let median = |way: Way| costs.get(&(way, name.to_owned())).map(|all| stats::median(all));
        let native =
            median(Way::Native).ok_or_else(|| Error::Host(format!("natively there is no {name}")))?;
        let rounded = |number: f64| (number * 1e4).round() / 1e4;
        let of = |way: Way| {
            let us = median(way)?;
            Some((way.key(), rounded(if way == Way::Native { us } else { us / native })))
        };
        Ok(Self { name: name.to_owned(), ways: Way::ALL.into_iter().filter_map(of).collect() })
    }
}

fn line(command: &mut Command) -> Result<String> {
    let output = command.output().context(|| format!("start {command:?}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

/// Returns the last word of a program's version.
fn version(program: Option<&PathBuf>) -> Result<Option<String>> {
    let said = program.map(|program| line(Command::new(program).arg("--version"))).transpose()?;
    Ok(said.map(|said| said.split_whitespace().last().unwrap_or_default().to_owned()))
}

/// Makes the job of the measuring program with Debian's C library, in a tree and in an archive.
fn small(release: Release, mercury: &Path, dir: &Path) -> Result<Job> {
    let tree = dir.join("tree");
    host::remove_tree(&tree)?;
    let mut archive = Archive::default();
    for name in ["bin", "dev", "lib", "lib/x86_64-linux-gnu", "lib64", "proc", "tmp"] {
        fs::create_dir_all(tree.join(name)).context(|| format!("make {name}"))?;
        archive.directory(name);
    }
    archive.char_device("dev/console", (5, 1));
    archive.char_device("dev/null", (1, 3));
    // Natively a plain file is enough.
    fs::write(tree.join("dev/null"), b"").context(|| "write dev/null".into())?;
    let debian = Image::ensure(release)?.tree().join("usr");
    let mut put = |name: &str, bytes: &[u8]| {
        let path = tree.join(name);
        archive.file(name, bytes);
        fs::write(&path, bytes).context(|| format!("write {}", path.display()))?;
        let all = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&path, all).context(|| format!("let {} be executed", path.display()))
    };
    let read = |path: &Path| fs::read(path).context(|| format!("read {}", path.display()));
    for (name, from) in FILES {
        put(name, &read(&debian.join(from))?)?;
    }
    put("bin/mercury", &read(mercury)?)?;
    put("init", INIT.as_bytes())?;
    let path = dir.join("initramfs.cpio");
    fs::write(&path, archive.finish()).context(|| format!("write {}", path.display()))?;
    Ok(Job { tree, files: Files::Archive(path), init: "/init", memory_mib: MEMORY_MIB, limit_s: LIMIT_S })
}

/// Reads the output of the measuring program, among other text of a console.
fn costs(text: &str) -> Option<Vec<(String, f64)>> {
    let object = |(at, _): (usize, &str)| {
        let value = serde_json::Deserializer::from_str(text.get(at..)?).into_iter::<Value>().next()?.ok()?;
        value["benchmarks"].is_array().then_some(value)
    };
    let report = text.match_indices('{').find_map(object)?;
    let one = |value: &Value| Some((value["name"].as_str()?.to_owned(), value["us"]["median"].as_f64()?));
    report["benchmarks"].as_array()?.iter().map(one).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
/// Figures for the tests of other modules.
pub mod tests {
    use super::*;

    /// Returns the figures of some host without gVisor.
    #[must_use]
    pub fn figures() -> Hosted {
        let costs = |way: Way| match way {
            Way::Native => 1.5,
            Way::Hosted => 3.0,
            Way::HostedIsolated => 15.0,
            Way::Uml => 450.0,
            _ => 30.0,
        };
        let ways = Way::ALL.into_iter().filter(|way| *way != Way::Gvisor);
        let costs = ways.flat_map(|way| {
            BENCHMARKS.iter().map(move |(name, _)| ((way, (*name).to_owned()), vec![costs(way)]))
        });
        let costs: Costs = costs.collect();
        let row = |(name, _): &(&str, &str)| Row::new(name, &costs).unwrap();
        Hosted {
            host: "6.1.0-host".into(),
            kernel: "6.1".into(),
            uml: "6.1.0-uml".into(),
            uml_seccomp: Some("7.3.4".into()),
            gvisor: None,
            rounds: 3,
            rounds_of_work: 2,
            left_out: vec!["gVisor (systrap): no such package".into()],
            benchmarks: BENCHMARKS.iter().map(row).collect(),
        }
    }

    #[test]
    fn other_text_on_the_console_is_ignored() {
        let text = "[    0.1] a {brace}\r\n{\"format\": 1,\r\n  \"benchmarks\": [\r\n \
                    {\"name\": \"fork\", \"us\": {\"median\": 2.5}}]}\r\n[ 1.0] Kernel panic";
        assert_eq!(costs(text).unwrap(), [("fork".to_owned(), 2.5)]);
        assert!(costs("{ \"benchmarks\": [").is_none());
        assert!(costs("nothing").is_none());
    }

    #[test]
    fn ratios_are_to_the_native_process() {
        let of = |way: Way, us: &[f64]| ((way, "fork".to_owned()), us.to_vec());
        let costs = Costs::from([of(Way::Native, &[2.0, 9.0, 1.0]), of(Way::Uml, &[5.0])]);
        let row = Row::new("fork", &costs).unwrap();
        assert_eq!(row.ways, BTreeMap::from([("native_us", 2.0), ("uml", 2.5)]));
        assert!(Row::new("exec", &costs).is_err());
    }

    fn nothing_yet(dir: &Path) -> Bench {
        Bench { dir: dir.to_owned(), costs: Costs::new(), left_out: LeftOut::new(), objects: BTreeSet::new() }
    }

    #[test]
    fn a_peer_that_fails_at_first_is_left_out() {
        let dir = std::env::temp_dir().join(format!("mercury-lab-ways-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let fails = PathBuf::from("/bin/false");
        let programs = Programs {
            mercury: fails.clone(),
            vmlinux: fails.clone(),
            image: fails.clone(),
            uml_seccomp: None,
            gvisor: Some(fails.clone()),
        };
        let job =
            Job { tree: dir.clone(), files: Files::Archive(fails), init: "/init", memory_mib: 1, limit_s: 9 };
        let mut bench = nothing_yet(&dir);
        let mut round = |way: Way, first: bool| {
            bench.round(&programs, Load::Small, &job, &[way], first).map_err(|error| error.to_string())
        };
        let (late, ours) = (round(Way::Gvisor, false), round(Way::Hosted, true));
        assert!(late.unwrap_err().starts_with("gVisor (systrap): the program has measured nothing"));
        assert!(ours.unwrap_err().starts_with("hosted: the program has measured nothing"));
        assert_eq!(round(Way::Gvisor, true), Ok(()));
        assert_eq!(round(Way::UmlSeccomp, true), Ok(()));
        // The failed ways are not tried again.
        assert_eq!((round(Way::Gvisor, false), round(Way::UmlSeccomp, false)), (Ok(()), Ok(())));
        assert!(bench.left_out[&(Way::Gvisor, Load::Small)].starts_with("the program has measured nothing"));
        assert_eq!(bench.left_out[&(Way::UmlSeccomp, Load::Small)], "UML (seccomp) is missing");
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_way_that_builds_something_else_is_named() {
        let mut bench = nothing_yet(Path::new(""));
        bench.objects.insert("a".to_owned());
        assert!(bench.same_objects(Way::Uml).is_ok());
        bench.objects.insert("b".to_owned());
        assert!(bench.same_objects(Way::Uml).unwrap_err().to_string().contains("UML (ptrace)"));
    }

    #[test]
    fn a_peer_that_cannot_be_built_is_left_out() {
        let mut bench = nothing_yet(Path::new(""));
        assert!(bench.had(Way::Gvisor, Err(Error::Host("no\nlog".into()))).is_none());
        assert!(bench.is_left_out(Load::Work, Way::Gvisor) && bench.is_left_out(Load::Small, Way::Gvisor));
        assert_eq!(bench.left_out[&(Way::Gvisor, Load::Small)], "no");
        bench.leave_out(Load::Work, Way::UmlSeccomp, &Error::Host("slow".into()));
        assert!(
            bench.is_left_out(Load::Work, Way::UmlSeccomp)
                && !bench.is_left_out(Load::Small, Way::UmlSeccomp)
        );
    }
}
