//! The machines in which the tests run.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::RELEASE;
use mercury_lab::{
    artefacts,
    error::{Context, Result},
    host, hosted,
    image::Image,
    paths,
    previrtualization::{self, Flavour},
    spec::QEMU,
};

/// The script that runs the tests.
const SCRIPT: &str = include_str!("../../../guest/hosted/ltp");
/// The machines' first program.
const INIT: &str = include_str!("../../../guest/hosted/ltp-init");
const MEMORY_MIB: u32 = 1024;
/// The size of the disk for tests of file systems.
const SCRATCH_MIB: u32 = 400;
/// Limit of a test in seconds, and the factor of the tests' own limits. An emulator is slow.
const LIMITS: [(u32, u32); 2] = [(300, 10), (600, 20)];
/// The kinds of isolation.
pub const ISOLATIONS: [&str; 2] = ["none", "process"];

/// A machine in which the tests run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The emulated machine.
    Bare {
        cpus: u32,
    },
    Hosted {
        isolation: &'static str,
        cpus: u32,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bare { cpus } => write!(formatter, "emulated, {cpus} CPU"),
            Self::Hosted { isolation, cpus } => {
                write!(formatter, "hosted, isolation {isolation}, {cpus} CPU")
            }
        }
    }
}

impl Place {
    /// Returns the name of the file with the results.
    pub(super) fn name(self) -> String {
        match self {
            Self::Bare { cpus } => format!("bare-{cpus}"),
            Self::Hosted { isolation, cpus } => format!("{isolation}-{cpus}"),
        }
    }

    /// Runs the tests of a list, and returns all that they say. Each machine has the same disks and the same
    /// first program.
    pub(super) fn run(self, tests: &Path, list: &[&str]) -> Result<String> {
        let name = format!("ltp-{}", self.name());
        let root = root_disk(&name, &(list.join("\n") + "\n"))?;
        let disks = Disks { root: &root, tests, scratch: &scratch_disk(&name)? };
        let mut command = match self {
            Self::Bare { cpus } => bare(cpus, &disks)?,
            Self::Hosted { isolation, cpus } => hosted_one(isolation, cpus, &disks)?,
        };
        // Each test says one line on the console.
        let ended = host::run_counted("tests in a machine", &name, &mut command, list.len() as u64);
        let said = said(&root)?;
        // What was said before the machine ended is worth keeping.
        match ended {
            Err(error) if said.is_empty() => return Err(error),
            Err(error) => println!("The machine has ended in the middle of a test. {error}"),
            Ok(()) => {}
        }
        Ok(said)
    }
}

/// The disks of a machine.
struct Disks<'a> {
    root: &'a Path,
    tests: &'a Path,
    /// An empty one, for tests of file systems.
    scratch: &'a Path,
}

/// Returns the kernel's command line.
fn append((limit, factor): (u32, u32), last: &str) -> String {
    format!("root=/dev/vda rw init=/usr/sbin/ltp-init -- {limit} {factor} {last}")
}

fn bare(cpus: u32, disks: &Disks<'_>) -> Result<Command> {
    let mut command = Command::new(QEMU);
    command.args(["-accel", "tcg", "-cpu", "max", "-nodefaults", "-nographic", "-no-reboot"]);
    command.args(["-serial", "stdio", "-m", &MEMORY_MIB.to_string(), "-smp", &cpus.to_string()]);
    for (disk, options) in [(disks.root, ""), (disks.tests, ",readonly=on"), (disks.scratch, "")] {
        let file = disk.to_string_lossy().replace(',', ",,");
        command.args(["-drive", &format!("if=virtio,format=raw,cache=unsafe,file={file}{options}")]);
    }
    // The emulator ends at a reset. On a busy host its timer may be late for the check of it.
    let append =
        format!("console=ttyS0 mitigations=off no_timer_check panic=-1 {}", append(LIMITS[1], "reboot"));
    let kernel = previrtualization::build(RELEASE, Flavour::PreVirtualized)?.image;
    command.args(["-append", &append, "-kernel"]).arg(kernel);
    Ok(command)
}

fn hosted_one(isolation: &str, cpus: u32, disks: &Disks<'_>) -> Result<Command> {
    let mut command = Command::new(artefacts::build_hosted()?);
    command.args(["hosted", "run", "--cpus", &cpus.to_string(), &format!("--isolation={isolation}")]);
    command.args(["--memory", &format!("{MEMORY_MIB}M"), "--append", &append(LIMITS[0], "poweroff")]);
    command.arg("--kernel").arg(previrtualization::build(RELEASE, Flavour::PreVirtualized)?.vmlinux);
    command.arg("--disk").arg(disks.root).arg("--disk").arg(format!("{},ro", disks.tests.display()));
    command.arg("--disk").arg(disks.scratch);
    Ok(command)
}

/// Returns a copy of Debian's disk with what runs the tests.
fn root_disk(name: &str, list: &str) -> Result<PathBuf> {
    let disk = paths::lab_dir("ltp")?.join(format!("{name}.img"));
    host::copy(&Image::ensure(RELEASE)?.disk(), &disk)?;
    hosted::put_file(&disk, "/usr/sbin/ltp-init", INIT, "0100755")?;
    hosted::put_file(&disk, "/root/ltp", SCRIPT, "0100755")?;
    hosted::put_file(&disk, "/root/ltp.list", list, "0100644")?;
    Ok(disk)
}

/// Returns an empty disk for tests of file systems.
fn scratch_disk(name: &str) -> Result<PathBuf> {
    let disk = paths::lab_dir("ltp")?.join(format!("{name}-scratch.img"));
    let made = fs::File::create(&disk).and_then(|file| file.set_len(u64::from(SCRATCH_MIB) << 20));
    made.context(|| format!("make {}", disk.display()))?;
    Ok(disk)
}

/// Returns what the tests have said, from the disk of a machine that has ended.
fn said(root: &Path) -> Result<String> {
    let mut check = Command::new("sh");
    check.args(["-c", "e2fsck -fp \"$1\"; [ $? -le 1 ]", "sh"]).arg(root);
    host::run("checking the hosted machine's file system", "ltp-check", &mut check)?;
    let read = Command::new("debugfs").args(["-R", "cat /root/said"]).arg(root).output();
    Ok(String::from_utf8_lossy(&read.context(|| "start debugfs".into())?.stdout).into_owned())
}
