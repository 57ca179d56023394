//! What a hosted kernel costs its programs: the same measuring program, natively, in a hosted kernel, in User Mode Linux and in
//! an emulated machine, one after the other in each round, all on the same processor of this host.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use mercury_initramfs::Archive;
use serde::Serialize;
use serde_json::Value;

use super::stats;
use crate::{
    artefacts,
    error::{Context, Error, Result},
    host,
    image::{Image, Release},
    live,
    markdown::table,
    paths,
    previrtualization::{self, Flavour},
    spec::QEMU,
};

/// The heading of its part of the section in docs/benchmarks.md.
pub const HEADING: &str = "### Hosted";

/// What is measured, by the names of `mercury bench os`, and what one of them is.
const BENCHMARKS: &[(&str, &str)] = &[
    ("null-call", "system call (getppid)"),
    ("page-fault", "page fault"),
    ("fork", "fork, exit, wait"),
    ("exec", "fork, exec, exit, wait"),
    ("pipe", "message through a pipe to another process"),
    ("ctx-2p-0k", "switch between two processes"),
];

/// Debian's package of User Mode Linux has this.
const UML: &str = "linux.uml";
const MEMORY_MIB: u32 = 512;
/// Seconds that one way may take.
const LIMIT: &str = "300";
/// The first program: it ends, so the kernel panics and the machine ends too.
const INIT: &str = "#!/bin/sh\nexec </dev/null 2>/dev/null\n/bin/mercury --json bench os --samples 5\n";
const QUIET: &str = "quiet loglevel=1 panic=-1";

/// What is run, from the image of Debian, beneath `usr`.
const FILES: &[(&str, &str)] = &[
    ("bin/sh", "bin/dash"),
    ("bin/true", "bin/true"),
    ("lib/x86_64-linux-gnu/libc.so.6", "lib/x86_64-linux-gnu/libc.so.6"),
    ("lib/x86_64-linux-gnu/libm.so.6", "lib/x86_64-linux-gnu/libm.so.6"),
    ("lib/x86_64-linux-gnu/libgcc_s.so.1", "lib/x86_64-linux-gnu/libgcc_s.so.1"),
    ("lib64/ld-linux-x86-64.so.2", "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"),
];

/// All figures.
#[derive(Clone, Debug, Serialize)]
pub struct Hosted {
    /// This host's kernel.
    pub host: String,
    /// The kernel that is hosted and emulated.
    pub kernel: String,
    /// User Mode Linux' kernel.
    pub uml: String,
    /// How often each way was measured.
    pub rounds: u32,
    /// By benchmark, in the order of [`BENCHMARKS`].
    pub benchmarks: Vec<Row>,
}

/// One benchmark: medians of all rounds. Ratios are to the native process.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// Microseconds, natively.
    pub native_us: f64,
    /// In a hosted kernel.
    pub hosted: f64,
    /// In a hosted kernel that leaves programs as they are.
    pub hosted_by_signals: f64,
    /// In a hosted kernel whose programs are in processes of their own.
    pub hosted_isolated: f64,
    /// In User Mode Linux.
    pub uml: f64,
    /// In an emulated machine.
    pub emulated: f64,
}

/// A way to run the measuring program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Native,
    Hosted,
    HostedBySignals,
    HostedIsolated,
    Uml,
    Emulated,
}

const WAYS: [Way; 6] =
    [Way::Native, Way::Hosted, Way::HostedBySignals, Way::HostedIsolated, Way::Uml, Way::Emulated];

/// What the ways need.
struct Place {
    tree: PathBuf,
    archive: PathBuf,
    mercury: PathBuf,
    vmlinux: PathBuf,
    image: PathBuf,
}

/// Measures, as often as is said.
///
/// # Errors
/// If something does not build or run, or User Mode Linux is not installed.
pub fn measure(release: Release, rounds: u32) -> Result<Hosted> {
    if host::find_program(UML).is_none() {
        return Err(Error::Host(format!("{UML} is missing: apt install user-mode-linux")));
    }
    let place = Place::new(release)?;
    let mut costs: BTreeMap<(Way, String), Vec<f64>> = BTreeMap::new();
    for round in 1..=rounds {
        live::say(&format!("A native process, hosted, User Mode Linux, emulated: round {round} of {rounds}"));
        for way in WAYS {
            for (name, us) in place.run(way)? {
                costs.entry((way, name)).or_default().push(us);
            }
        }
    }
    let median = |way: Way, name: &str| {
        let all = costs.get(&(way, name.to_owned()));
        all.map(|all| stats::median(all)).ok_or_else(|| Error::Host(format!("{way:?} has no {name}")))
    };
    let benchmarks = BENCHMARKS.iter().map(|(name, _)| Row::new(name, |way| median(way, name)));
    Ok(Hosted {
        host: line(Command::new("uname").arg("-r"))?.split('-').next().unwrap_or_default().to_owned(),
        kernel: release.to_string(),
        uml: line(Command::new(UML).arg("--version"))?,
        rounds,
        benchmarks: benchmarks.collect::<Result<_>>()?,
    })
}

impl Row {
    fn new(name: &str, median: impl Fn(Way) -> Result<f64>) -> Result<Self> {
        let native = median(Way::Native)?;
        let rounded = |number: f64, to: f64| (number * to).round() / to;
        let ratio = |way| median(way).map(|us| rounded(us / native, 100.0));
        Ok(Self {
            name: name.to_owned(),
            native_us: rounded(native, 1000.0),
            hosted: ratio(Way::Hosted)?,
            hosted_by_signals: ratio(Way::HostedBySignals)?,
            hosted_isolated: ratio(Way::HostedIsolated)?,
            uml: ratio(Way::Uml)?,
            emulated: ratio(Way::Emulated)?,
        })
    }
}

fn line(command: &mut Command) -> Result<String> {
    let output = command.output().context(|| format!("start {command:?}"))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

impl Place {
    fn new(release: Release) -> Result<Self> {
        let built = previrtualization::build(release, Flavour::PreVirtualized)?;
        let mercury = artefacts::build_program("mercury-cli", "mercury")?;
        let directory = paths::lab_dir("bench")?.join("hosted");
        let tree = directory.join("tree");
        host::remove_tree(&tree)?;
        let mut archive = Archive::default();
        for name in ["bin", "dev", "lib", "lib/x86_64-linux-gnu", "lib64", "proc", "tmp"] {
            fs::create_dir_all(tree.join(name)).context(|| format!("make {name}"))?;
            archive.directory(name);
        }
        archive.char_device("dev/console", (5, 1));
        archive.char_device("dev/null", (1, 3));
        // Natively a file does.
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
        put("bin/mercury", &read(&mercury)?)?;
        put("init", INIT.as_bytes())?;
        let path = directory.join("initramfs.cpio");
        fs::write(&path, archive.finish()).context(|| format!("write {}", path.display()))?;
        Ok(Self { tree, archive: path, mercury, vmlinux: built.vmlinux, image: built.image })
    }

    /// Runs the measuring program once: names and microseconds.
    fn run(&self, way: Way) -> Result<Vec<(String, f64)>> {
        let mut command = self.command(way);
        let output = command.stdin(Stdio::null()).output().context(|| format!("start {command:?}"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        costs(&text).ok_or_else(|| {
            let errors = String::from_utf8_lossy(&output.stderr);
            Error::Host(format!("{command:?} has measured nothing ({}): {text}{errors}", output.status))
        })
    }

    /// On one processor, so that all ways have the same.
    fn command(&self, way: Way) -> Command {
        let mut command = host::as_root("taskset");
        // User Mode Linux aborts when its first program ends, and may leave a core.
        command.current_dir(self.archive.parent().unwrap_or(Path::new("/tmp")));
        command.args(["-c", "0", "timeout", LIMIT]);
        match way {
            Way::Native => command.arg("chroot").arg(&self.tree).arg("/init"),
            Way::Hosted | Way::HostedBySignals | Way::HostedIsolated => {
                command.arg(&self.mercury).args(["hosted", "run", "--append", QUIET, "--memory"]);
                command.arg(MEMORY_MIB.to_string()).arg("--kernel").arg(&self.vmlinux);
                match way {
                    Way::HostedBySignals => drop(command.arg("--no-rewrite")),
                    Way::HostedIsolated => drop(command.arg("--isolation=process")),
                    _ => {}
                }
                command.arg("--initramfs").arg(&self.archive)
            }
            Way::Uml => command
                .arg(UML)
                .args([&format!("mem={MEMORY_MIB}M"), "con=null", "con0=null,fd:1", QUIET])
                .arg(format!("initrd={}", self.archive.display())),
            Way::Emulated => command
                .args([QEMU, "-accel", "tcg", "-cpu", "max", "-nodefaults", "-nographic", "-no-reboot"])
                .args(["-serial", "stdio", "-m", &MEMORY_MIB.to_string()])
                .args(["-append", &format!("console=ttyS0 mitigations=off {QUIET}")])
                .arg("-kernel")
                .arg(&self.image)
                .arg("-initrd")
                .arg(&self.archive),
        };
        command
    }
}

/// What the measuring program has printed, among whatever a console says.
fn costs(text: &str) -> Option<Vec<(String, f64)>> {
    let object = |(at, _): (usize, &str)| {
        let value = serde_json::Deserializer::from_str(text.get(at..)?).into_iter::<Value>().next()?.ok()?;
        value["benchmarks"].is_array().then_some(value)
    };
    let report = text.match_indices('{').find_map(object)?;
    let one = |value: &Value| Some((value["name"].as_str()?.to_owned(), value["us"]["median"].as_f64()?));
    report["benchmarks"].as_array()?.iter().map(one).collect()
}

/// Its part of the section in docs/benchmarks.md.
#[must_use]
pub fn section(figures: &Hosted) -> String {
    let row = |row: &Row| {
        let what = BENCHMARKS.iter().find(|(name, _)| *name == row.name).map_or("", |(_, what)| what);
        let ratios = [row.hosted, row.hosted_by_signals, row.hosted_isolated, row.uml, row.emulated];
        let first = [what.to_owned(), format!("{:.2} µs", row.native_us)];
        first.into_iter().chain(ratios.map(|ratio| format!("{ratio:.1}"))).collect()
    };
    let rows: Vec<Vec<String>> = figures.benchmarks.iter().map(row).collect();
    let header = [
        "",
        "native",
        "hosted",
        "hosted, by signals",
        "hosted, processes",
        "User Mode Linux (ptrace)",
        "emulated (QEMU TCG)",
    ];
    format!(
        "{HEADING}\n\n\
        `mercury hosted run` ([hosted.md](hosted.md)) beside its likes: `mercury bench os` with Debian's C library in the same\n\
        file system in memory, on one processor of a host with Linux {}: as a native process; in the small kernel, hosted,\n\
        hosted with programs left as they are (`--no-rewrite`), and hosted with programs in processes of their own\n\
        (`--isolation=process`); in User Mode Linux {}; and in the same small kernel in an emulated machine. Medians of {} rounds, each with\n\
        all ways side by side; times are this host's, the others are ratios to the native process.\n\n{}",
        figures.host,
        figures.uml,
        figures.rounds,
        table(&header, &rows)
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
/// Figures for others' tests.
pub mod tests {
    use super::*;

    /// Of some host.
    #[must_use]
    pub fn figures() -> Hosted {
        let row = |(name, _): &(&str, &str)| Row {
            name: (*name).to_owned(),
            native_us: 1.5,
            hosted: 2.25,
            hosted_by_signals: 20.0,
            hosted_isolated: 10.0,
            uml: 100.0,
            emulated: 30.0,
        };
        Hosted {
            host: "6.1.0-host".into(),
            kernel: "6.1".into(),
            uml: "6.1.0-uml".into(),
            rounds: 3,
            benchmarks: BENCHMARKS.iter().map(row).collect(),
        }
    }

    #[test]
    fn what_a_console_says_besides_does_not_matter() {
        let text = "[    0.1] a {brace}\r\n{\"format\": 1,\r\n  \"benchmarks\": [\r\n {\"name\": \"fork\", \"us\": {\"median\": 2.5}}]}\r\n[ 1.0] Kernel panic";
        assert_eq!(costs(text).unwrap(), [("fork".to_owned(), 2.5)]);
        assert!(costs("{ \"benchmarks\": [").is_none());
        assert!(costs("nothing").is_none());
    }

    #[test]
    fn ratios_are_to_the_native_process() {
        let row = Row::new("fork", |way| Ok(if way == Way::Native { 2.0 } else { 5.0 })).unwrap();
        assert!((row.native_us - 2.0).abs() < 1e-9 && (row.uml - 2.5).abs() < 1e-9);
        let section = section(&figures());
        assert!(
            section.contains("| 1.50 µs ") && section.contains(" 2.2 ") && section.contains("6.1.0-uml"),
            "{section}"
        );
    }
}
