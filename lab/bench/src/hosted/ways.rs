//! The ways to run the same programs from the same file system, all on the same processor of this host.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use serde_json::{Value, json};

use super::peers::UML;
use mercury_lab::{
    artefacts,
    error::{Context, Error, Result},
    host,
    image::Release,
    previrtualization::{self, Flavour},
    spec::QEMU,
};

const QUIET: &str = "quiet loglevel=1 panic=-1";
/// The native way: files that are read only as well, for this program alone.
const NATIVE: &str = "\
set -e
mount --bind \"$0\" \"$0\"
mount -o remount,bind,ro \"$0\"
exec chroot \"$0\" \"$1\"";
/// The rights that gVisor gives to root, as a kernel of its own would.
const CAPABILITIES: &[&str] = &[
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_ADMIN",
    "CAP_SYS_CHROOT",
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
];

/// A way to run programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    Native,
    Hosted,
    /// In a hosted kernel that leaves programs unpatched.
    HostedBySignals,
    /// In a hosted kernel whose programs are in processes of their own.
    HostedIsolated,
    /// In Debian 12's User Mode Linux.
    Uml,
    UmlSeccomp,
    Gvisor,
    Emulated,
}

impl Way {
    /// All ways, in the order of the table.
    pub const ALL: [Self; 8] = [
        Self::Native,
        Self::Hosted,
        Self::HostedBySignals,
        Self::HostedIsolated,
        Self::Uml,
        Self::UmlSeccomp,
        Self::Gvisor,
        Self::Emulated,
    ];

    /// Returns the way's key among the figures.
    #[must_use]
    pub fn key(self) -> &'static str {
        match self {
            Self::Native => "native_us",
            Self::Hosted => "hosted",
            Self::HostedBySignals => "hosted_by_signals",
            Self::HostedIsolated => "hosted_isolated",
            Self::Uml => "uml",
            Self::UmlSeccomp => "uml_seccomp",
            Self::Gvisor => "gvisor",
            Self::Emulated => "emulated",
        }
    }

    /// Returns the heading of the way's column.
    #[must_use]
    pub fn heading(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Hosted => "hosted",
            Self::HostedBySignals => "hosted, by signals",
            Self::HostedIsolated => "hosted, processes",
            Self::Uml => "UML (ptrace)",
            Self::UmlSeccomp => "UML (seccomp)",
            Self::Gvisor => "gVisor (systrap)",
            Self::Emulated => "emulated (QEMU TCG)",
        }
    }

    /// Returns true for a hosted kernel or a native process. The other ways are others' systems.
    #[must_use]
    pub fn is_ours(self) -> bool {
        matches!(self, Self::Native | Self::Hosted | Self::HostedBySignals | Self::HostedIsolated)
    }

    /// Returns true if the table may lack this way: another system with which no promise compares.
    #[must_use]
    pub fn may_be_left_out(self) -> bool {
        matches!(self, Self::UmlSeccomp | Self::Gvisor)
    }
}

/// The place of the files for a way's kernel. A tree of the same files is beside them.
#[derive(Clone, Debug)]
pub enum Files {
    /// An archive that becomes a file system in memory.
    Archive(PathBuf),
    /// A disk that is read only.
    Disk(PathBuf),
}

/// The programs and files of each way.
#[derive(Clone, Debug)]
pub struct Job {
    /// The tree of files, for ways without a kernel of their own.
    pub tree: PathBuf,
    /// The same files, for a kernel.
    pub files: Files,
    /// The first program. When it ends, its kernel panics and the machine ends too.
    pub init: &'static str,
    /// The size of a machine's memory.
    pub memory_mib: u32,
    /// Time limit of one way, in seconds.
    pub limit_s: u32,
}

/// The programs that make the ways.
#[derive(Debug)]
pub struct Programs {
    /// `mercury` in its release build.
    pub mercury: PathBuf,
    pub vmlinux: PathBuf,
    /// The small kernel's image for an emulated machine.
    pub image: PathBuf,
    /// The newest User Mode Linux, if it could be made.
    pub uml_seccomp: Option<PathBuf>,
    /// gVisor, if it could be fetched.
    pub gvisor: Option<PathBuf>,
}

impl Programs {
    /// Builds the project's own programs. The others' are still missing.
    ///
    /// # Errors
    /// If a program does not build.
    pub fn build(release: Release) -> Result<Self> {
        let built = previrtualization::build(release, Flavour::PreVirtualized)?;
        let mercury = artefacts::build_hosted()?;
        Ok(Self { mercury, vmlinux: built.vmlinux, image: built.image, uml_seccomp: None, gvisor: None })
    }

    /// Runs a job and returns its output. `dir` is for the way's temporary files.
    ///
    /// # Errors
    /// If the job cannot be started. The way it ends says nothing: a kernel whose first program
    /// ends panics.
    pub fn run(&self, way: Way, job: &Job, dir: &Path) -> Result<Output> {
        // User Mode Linux aborts when its first program ends, and may leave a core.
        let mut command = host::as_root("taskset");
        command.current_dir(dir).args(["-c", "0", "timeout", "--kill-after=10", &job.limit_s.to_string()]);
        match way {
            Way::Native => native(&mut command, job),
            Way::Hosted | Way::HostedBySignals | Way::HostedIsolated => self.hosted(way, &mut command, job),
            Way::Uml => uml(Path::new(UML), &mut command, job, dir),
            Way::UmlSeccomp => {
                uml(had(&self.uml_seccomp, way)?, &mut command, job, dir);
                command.arg("seccomp=on");
            }
            Way::Gvisor => return gvisor(had(&self.gvisor, way)?, command, job, dir),
            Way::Emulated => self.emulated(&mut command, job),
        }
        output(&mut command)
    }

    fn hosted(&self, way: Way, command: &mut Command, job: &Job) {
        command.arg(&self.mercury).args(["hosted", "run", "--memory", &job.memory_mib.to_string()]);
        command.arg("--kernel").arg(&self.vmlinux);
        match way {
            Way::HostedBySignals => drop(command.arg("--no-rewrite")),
            Way::HostedIsolated => drop(command.arg("--isolation=process")),
            _ => {}
        }
        match &job.files {
            Files::Archive(path) => command.arg("--initramfs").arg(path).args(["--append", QUIET]),
            Files::Disk(path) => {
                let append = format!("{QUIET} root=/dev/vda ro init={}", job.init);
                command.arg("--disk").arg(format!("{},ro", path.display())).args(["--append", &append])
            }
        };
    }

    fn emulated(&self, command: &mut Command, job: &Job) {
        command
            .args([QEMU, "-accel", "tcg", "-cpu", "max", "-nodefaults", "-nographic", "-no-reboot"])
            .args(["-serial", "stdio", "-m", &job.memory_mib.to_string()])
            .arg("-kernel")
            .arg(&self.image);
        let append = format!("console=ttyS0 mitigations=off {QUIET}");
        match &job.files {
            Files::Archive(path) => command.arg("-initrd").arg(path).args(["-append", &append]),
            Files::Disk(path) => command
                .args(["-append", &format!("{append} root=/dev/vda ro init={}", job.init), "-drive"])
                .arg(format!("if=virtio,format=raw,readonly=on,file={}", path.display())),
        };
    }
}

fn had(program: &Option<PathBuf>, way: Way) -> Result<&Path> {
    program.as_deref().ok_or_else(|| Error::Host(format!("{} is missing", way.heading())))
}

fn native(command: &mut Command, job: &Job) {
    match job.files {
        Files::Archive(_) => command.arg("chroot").arg(&job.tree).arg(job.init),
        Files::Disk(_) => command
            .args(["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", NATIVE])
            .arg(&job.tree)
            .arg(job.init),
    };
}

fn uml(program: &Path, command: &mut Command, job: &Job, dir: &Path) {
    command.arg(program).args([&format!("mem={}M", job.memory_mib), "con=null", "con0=null,fd:1", QUIET]);
    // Each run leaves a directory, by default in its user's home.
    command.arg(format!("uml_dir={}", dir.join("uml").display()));
    match &job.files {
        Files::Archive(path) => command.arg(format!("initrd={}", path.display())),
        Files::Disk(path) => command.arg(format!("ubd0r={}", path.display())).args([
            "root=/dev/ubda",
            "ro",
            &format!("init={}", job.init),
        ]),
    };
}

/// Runs a job in a gVisor sandbox of its own, and removes the sandbox.
fn gvisor(program: &Path, mut command: Command, job: &Job, dir: &Path) -> Result<Output> {
    let (bundle, state) = (dir.join("gvisor"), dir.join("gvisor/state"));
    fs::create_dir_all(&state).context(|| format!("make {}", state.display()))?;
    let path = bundle.join("config.json");
    fs::write(&path, bundle_of(job).to_string()).context(|| format!("write {}", path.display()))?;
    let runsc = |command: &mut Command| {
        command.arg(program).arg("--root").arg(&state).args(["--ignore-cgroups", "--network=none"]);
        command.arg("--platform=systrap");
    };
    runsc(&mut command);
    let name = format!("mercury-bench-{}", std::process::id());
    let done = output(command.arg("run").arg("--bundle").arg(&bundle).arg(&name))?;
    let mut delete = host::as_root("env");
    runsc(&mut delete);
    // The sandbox is gone already, unless its time was up.
    output(delete.args(["delete", "--force", &name]))?;
    Ok(done)
}

/// Returns the sandbox's description by the Open Container Initiative.
fn bundle_of(job: &Job) -> Value {
    let mount = |to: &str, kind: &str| json!({"destination": to, "type": kind, "source": kind});
    json!({
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": [job.init],
            "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": {
                "bounding": CAPABILITIES, "effective": CAPABILITIES, "permitted": CAPABILITIES
            }
        },
        "root": {"path": job.tree, "readonly": true},
        "hostname": "lab",
        "mounts": [
            mount("/proc", "proc"),
            mount("/tmp", "tmpfs"),
            mount("/run", "tmpfs"),
            mount("/dev/shm", "tmpfs"),
        ],
        "linux": {"namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}]}
    })
}

fn output(command: &mut Command) -> Result<Output> {
    command.stdin(Stdio::null()).output().context(|| format!("start {command:?}"))
}
