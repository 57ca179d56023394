//! The reasons for which a checkpoint, a snapshot or a move of this machine would be refused before
//! it begins. The commands refuse by these checks; `mercury migrate --dry-run` and `mercury doctor`
//! predict by the same checks.

use crate::{
    restore::{fit, microcode},
    tombstone::{self, StartedBy},
};
use mercury_abi::code::Code;
use mercury_control::{
    error::{Error, Result},
    lockdown,
    sysroot::Sysroot,
};
use mercury_quiesce::{
    arrays, describe, devices, disks,
    ethernet::{self, made},
    macsec,
    mounts::{self, Mounted},
    nfs::{self, Volume},
    plugged, swap,
    volumes::{self, Disks},
    watchdogs, writers,
};
use std::path::Path;

/// An operation on the whole machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Checkpoint,
    /// `mercury checkpoint --poweroff`: the machine must be one that can be brought back.
    PowerOff,
    Snapshot,
    Migrate,
}

impl Operation {
    /// Returns the command's name.
    fn name(self) -> &'static str {
        match self {
            Checkpoint | PowerOff => "checkpoint",
            Snapshot => "snapshot",
            Migrate => "migrate",
        }
    }
}

/// A reason for refusal that the operator has lifted by an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifted {
    /// Lifted by --force-devices.
    Devices,
    /// Lifted by --force-offline.
    Offline,
    /// Lifted by --force-disks.
    Disks,
    /// Lifted by --without-tombstone.
    Tombstone,
}

/// A check of the machine.
struct Question {
    name: &'static str,
    /// The text for a check that passes.
    fine: &'static str,
    /// The operations that run this check first.
    before: &'static [Operation],
    /// The option that skips the check.
    lifted_by: Option<Lifted>,
    ask: fn(Operation, &Sysroot) -> Result<()>,
}

use Operation::{Checkpoint, Migrate, PowerOff, Snapshot};

const SERVED: &str = "none whose version does not survive a second life";
const COMPARABLE: &str = "the fingerprints of all file systems can be compared";

const QUESTIONS: &[Question] = &[
    Question {
        name: "kernel lockdown",
        fine: "the kernel lets root read its memory",
        before: &[Checkpoint, PowerOff, Migrate],
        lifted_by: None,
        ask: |operation, sysroot| lockdown::refuse_reading(operation.name(), sysroot),
    },
    Question {
        name: "lockdown",
        fine: "a restore environment may replace its memory",
        before: &[PowerOff],
        lifted_by: Some(Lifted::Devices),
        ask: |_, sysroot| lockdown::refuse_restore("bringing the machine back", sysroot),
    },
    Question {
        name: "microcode",
        fine: "a restore environment has the same",
        before: &[PowerOff],
        lifted_by: Some(Lifted::Devices),
        ask: |_, sysroot| refuse_microcode(sysroot),
    },
    Question {
        name: "swap",
        fine: "none, or room in memory to read it back",
        before: &[Checkpoint, PowerOff, Snapshot, Migrate],
        lifted_by: None,
        ask: |_, sysroot| swap::refuse(sysroot),
    },
    Question {
        name: "devices",
        fine: "no device in use writes to memory unseen",
        before: &[Checkpoint, PowerOff, Snapshot, Migrate],
        lifted_by: Some(Lifted::Devices),
        ask: |_, sysroot| devices::refuse_untracked(sysroot),
    },
    Question {
        name: "CXL memory",
        fine: "none that a restart would forget",
        before: &[Checkpoint, PowerOff, Migrate],
        lifted_by: Some(Lifted::Devices),
        ask: |_, sysroot| devices::refuse_forgotten(sysroot),
    },
    Question {
        name: "plugged memory",
        fine: "none that a restore environment would not find",
        before: &[Checkpoint, PowerOff, Migrate],
        lifted_by: None,
        ask: |_, sysroot| plugged::refuse(sysroot),
    },
    Question {
        name: "restore environment",
        fine: "it would have the devices of this machine",
        before: &[PowerOff],
        lifted_by: Some(Lifted::Devices),
        ask: |_, sysroot| fit::refuse_unrestorable(&describe::describe(sysroot), sysroot),
    },
    Question {
        name: "MACsec",
        fine: "no network device encrypts with it",
        before: &[Checkpoint, PowerOff, Snapshot, Migrate],
        lifted_by: None,
        ask: |_, sysroot| macsec::refuse(sysroot),
    },
    Question {
        name: "devices' writes",
        fine: "the kernel can report them",
        before: &[Checkpoint, PowerOff, Snapshot, Migrate],
        lifted_by: None,
        ask: |_, sysroot| refuse_without_ftrace(sysroot),
    },
    Question {
        name: "watchdogs",
        fine: "none that could not be fed through the pause",
        before: &[Checkpoint, PowerOff, Snapshot, Migrate],
        lifted_by: None,
        ask: |_, sysroot| watchdogs::refuse(sysroot),
    },
    Question {
        name: "offline CPUs",
        fine: "none",
        before: &[Checkpoint, PowerOff, Migrate],
        lifted_by: Some(Lifted::Offline),
        ask: |_, sysroot| devices::refuse_offline(sysroot),
    },
    Question {
        name: "number of CPUs",
        fine: "a restore brings back so many",
        before: &[Checkpoint, PowerOff, Migrate],
        lifted_by: Some(Lifted::Devices),
        ask: |_, sysroot| devices::refuse_many_cpus(sysroot),
    },
    Question {
        name: "network cards",
        fine: "none is a part of a bond",
        before: &[Migrate],
        lifted_by: None,
        ask: |_, sysroot| refuse_bundled(sysroot),
    },
    Question {
        name: "file systems",
        fine: "all can be frozen",
        before: &[Checkpoint, PowerOff, Snapshot, Migrate],
        lifted_by: None,
        ask: |_, sysroot| disks::all(sysroot).map(drop),
    },
    Question {
        name: "volumes",
        fine: "none writes to its disks by itself, or it can be held",
        before: &[PowerOff, Migrate],
        lifted_by: None,
        ask: |_, sysroot| volumes::refuse_restless(Disks::AsLeft, sysroot),
    },
    Question {
        name: "arrays",
        fine: "none whose metadata a program writes",
        before: &[Checkpoint, PowerOff, Snapshot, Migrate],
        lifted_by: None,
        ask: |_, sysroot| arrays::refuse_external(sysroot),
    },
    Question {
        name: "fingerprints",
        fine: COMPARABLE,
        before: &[PowerOff],
        lifted_by: Some(Lifted::Devices),
        ask: refuse_uncomparable,
    },
    Question {
        name: "fingerprints",
        fine: COMPARABLE,
        before: &[Migrate],
        lifted_by: None,
        ask: refuse_uncomparable,
    },
    Question {
        name: "local disks",
        fine: "none is mounted for writing",
        before: &[Snapshot],
        lifted_by: Some(Lifted::Disks),
        ask: |_, sysroot| refuse_disks(sysroot),
    },
    Question {
        name: "raw disks",
        fine: "no process can write to one",
        before: &[Snapshot],
        lifted_by: Some(Lifted::Disks),
        ask: |_, sysroot| refuse_disk_writers(sysroot),
    },
    Question {
        name: "volumes",
        fine: "none has metadata of its own in memory",
        before: &[Snapshot],
        lifted_by: Some(Lifted::Disks),
        ask: |_, sysroot| refuse_remembered_volumes(sysroot),
    },
    Question { name: "NFS", fine: SERVED, before: &[Snapshot], lifted_by: None, ask: refuse_sessions },
    Question {
        name: "NFS",
        fine: SERVED,
        before: &[Checkpoint],
        lifted_by: Some(Lifted::Devices),
        ask: refuse_sessions,
    },
    Question {
        name: "tombstone",
        fine: "there is a place that survives a power cut, or only an operator starts this machine",
        before: &[Migrate],
        lifted_by: Some(Lifted::Tombstone),
        ask: |_, sysroot| tombstone::refuse_placeless(StartedBy::of_this_machine(), sysroot),
    },
];

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The subject of the check.
    pub about: &'static str,
    /// The text for a pass, or the reason for a refusal.
    pub result: Result<&'static str>,
}

/// Runs all checks for an operation.
#[must_use]
pub fn ask(operation: Operation, lifted: &[Lifted], sysroot: &Sysroot) -> Vec<Answer> {
    let is_spared = |question: &Question| question.lifted_by.is_some_and(|by| lifted.contains(&by));
    let asked = QUESTIONS.iter().filter(|question| question.before.contains(&operation));
    asked
        .filter(|question| !is_spared(question))
        .map(|question| Answer {
            about: question.name,
            result: (question.ask)(operation, sysroot).map(|()| question.fine),
        })
        .collect()
}

/// Refuses an operation for the first reason that applies. If there are more, the hint says so.
///
/// # Errors
///
/// Returns the first reason.
pub fn refuse(operation: Operation, lifted: &[Lifted], sysroot: &Sysroot) -> Result<()> {
    let mut reasons = ask(operation, lifted, sysroot).into_iter().filter_map(|answer| answer.result.err());
    let Some(mut first) = reasons.next() else { return Ok(()) };
    let others = reasons.count();
    if others > 0 {
        let more = if others == 1 { "There is one more reason" } else { "There are more reasons" };
        let hint = first.hint.take().map(|hint| format!("{hint}. ")).unwrap_or_default();
        first.hint = Some(format!("{hint}{more}: `mercury doctor` lists all"));
    }
    Err(first)
}

/// Collects the options that are given.
#[must_use]
pub fn lifted(options: &[(bool, Lifted)]) -> Vec<Lifted> {
    options.iter().filter(|(given, _)| *given).map(|(_, lifted)| *lifted).collect()
}

/// Refuses file systems whose fingerprints the restore environment could not compare.
fn refuse_uncomparable(operation: Operation, sysroot: &Sysroot) -> Result<()> {
    let Ok(mounts) = disks::all(sysroot) else { return Ok(()) };
    if operation == Migrate {
        let mounts = disks::to_be_compared(&mounts, sysroot);
        return disks::refuse_unreadable(&mounts, sysroot).map_err(|error| error.hint("unmount it"));
    }
    disks::refuse_unreadable(&mounts, sysroot)
}

/// Refuses a machine whose restore environment would have other microcode.
fn refuse_microcode(sysroot: &Sysroot) -> Result<()> {
    microcode::predict_in(sysroot).map_err(|why| {
        let text = format!("a restore environment on this machine would refuse the image: {why}");
        Error::coded(Code::RestoreUnfit, text).hint(
            "restart this machine once, so that it starts with that microcode (`update-initramfs -u` puts \
             it into the initial RAM disk), and try again; or go on with --force-devices, for an image that \
             is only to be inspected",
        )
    })
}

/// Refuses a kernel whose function tracer is switched off: by tracing, the driver sees which memory
/// devices are given.
fn refuse_without_ftrace(sysroot: &Sysroot) -> Result<()> {
    if sysroot.text("proc/sys/kernel/ftrace_enabled").as_deref() != Some("0") {
        return Ok(());
    }
    let text = "the kernel's function tracer is off (kernel.ftrace_enabled=0); the driver needs it to see \
        what devices write";
    Err(Error::coded(Code::SnapshotDevices, text).hint("`sysctl kernel.ftrace_enabled=1`"))
}

/// Refuses cards that are parts of a bond: after the move the cards have other addresses.
fn refuse_bundled(sysroot: &Sysroot) -> Result<()> {
    let bundled = made::bundled(&ethernet::cards(sysroot), sysroot);
    let Some((card, whole)) = bundled.first() else { return Ok(()) };
    let why = format!(
        "{card} is a part of {whole}, which is no bridge: after the move the card would have the \
         destination's address, and {whole} would keep its own"
    );
    Err(Error::coded(Code::CardsBundled, why))
}

/// Refuses local file systems that are mounted for writing: memory must never be put back beside a
/// disk that has changed.
pub fn refuse_disks(sysroot: &Sysroot) -> Result<()> {
    let mounts = mounts::mounted(sysroot)?;
    let found: Vec<_> = mounts.iter().filter(|mount| is_left_behind(mount)).collect();
    if found.is_empty() {
        return Ok(());
    }
    let named = |mount: &&Mounted| format!("{} ({})", mount.at.display(), mount.device.display());
    let text = format!(
        "local file systems are mounted for writing, and a rollback puts back memory only: {}",
        found.iter().map(named).collect::<Vec<_>>().join(", ")
    );
    Err(Error::coded(Code::DisksStayBehind, text))
}

/// Refuses disks that a process has open for writing, such as those of virtual machines. The process
/// would go back, and its disk would not.
///
/// # Errors
///
/// Returns an error that names each disk with its processes.
pub fn refuse_disk_writers(sysroot: &Sysroot) -> Result<()> {
    let found = writers::of_disks(sysroot);
    if found.is_empty() {
        return Ok(());
    }
    let text = format!(
        "processes have local disks open for writing, and a rollback puts back memory only: {}",
        found.join(", ")
    );
    Err(Error::coded(Code::DisksStayBehind, text).hint(
        "stop these processes, or move the disks of virtual machines to the network; if the disks can go \
         back too (by --hook and --put-back), use --force-disks",
    ))
}

/// Refuses volumes whose metadata the kernel keeps in memory and writes to disks: the kernel of the
/// instant would write old metadata over new.
///
/// # Errors
///
/// Returns an error that names them.
pub fn refuse_remembered_volumes(sysroot: &Sysroot) -> Result<()> {
    volumes::refuse_restless(Disks::LeftBehind, sysroot)
}

/// Refuses NFS 4.1 and later in any mount namespace or in none ([`Volume::has_sessions`]).
fn refuse_sessions(operation: Operation, sysroot: &Sysroot) -> Result<()> {
    let mut volumes = nfs::volumes(sysroot).into_iter();
    let Some(Volume { at, version }) = volumes.find(Volume::has_sessions) else { return Ok(()) };
    if operation == Snapshot {
        let text = format!("{at} is on NFS {version}, which does not survive a rollback");
        return Err(Error::coded(Code::NfsSessions, text));
    }
    let text = format!(
        "{at} is on NFS {version}, which does not survive a restore of a machine that has run on after its \
         checkpoint"
    );
    Err(Error::coded(Code::NfsSessions, text).hint(
        "mount it with vers=4.0 or vers=3, or use --poweroff; or go on with --force-devices, for an image \
         that is only to be inspected",
    ))
}

/// Returns true if a rollback of memory leaves the file system as it is, and it can be written to.
pub fn is_left_behind(mount: &Mounted) -> bool {
    mount.writable && is_on_disk(mount)
}

/// Returns true for a file system on a disk. RAM disks are memory.
pub fn is_on_disk(mount: &Mounted) -> bool {
    !is_memory(&mount.device)
}

/// Returns true for a block device that a rollback puts back with memory.
fn is_memory(device: &Path) -> bool {
    let name = device.strip_prefix("/dev").unwrap_or(device).to_string_lossy().into_owned();
    name.starts_with("ram") || name.starts_with("zram")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::symlink};

    /// Makes a machine with every obstacle.
    fn bad_machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        let write = |file: &str, text: &str| {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        };
        write(
            "proc/self/mountinfo",
            "22 1 8:1 / / rw - ext4 /dev/none rw\n30 1 0:9 / /n rw - nfs4 s:/ rw,vers=4.2\n",
        );
        write("proc/swaps", "Filename Type Size Used Priority\n/dev/sdb partition 1000 10 -2\n");
        write("sys/devices/system/cpu/online", "0-1\n");
        write("sys/devices/system/cpu/present", "0-3\n");
        write("sys/class/watchdog/watchdog0/state", "active\n");
        write("sys/class/watchdog/watchdog0/timeout", "2\n");
        write("sys/kernel/security/lockdown", "none integrity [confidentiality]\n");
        write("proc/iomem", "00000000-0009ffff : System RAM\n00100000-001fffff : System RAM (virtio_mem)\n");
        let mut boot = vec![0; 4096];
        boot[0x1e8] = 1;
        boot[0x2d0 + 8..0x2d0 + 16].copy_from_slice(&0xA_0000_u64.to_le_bytes());
        let path = root.path().join("sys/kernel/boot_params/data");
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, boot).expect("a file");
        write("sys/bus/pci/devices/0000:00:01.0/class", "0x120000\n");
        // A virtual function of a card.
        write("sys/bus/pci/devices/0000:00:01.0/physfn/class", "0x120000\n");
        symlink("../drivers/secret", root.path().join("sys/bus/pci/devices/0000:00:01.0/driver"))
            .expect("a link");
        // A guest's disk, which is not mounted here.
        write("sys/class/block/sdb/dev", "8:16\n");
        write("proc/77/comm", "qemu-system-x86\n");
        write("proc/77/fdinfo/3", "pos:\t0\nflags:\t02140002\n");
        fs::create_dir_all(root.path().join("proc/77/fd")).expect("a folder");
        symlink("/dev/sdb", root.path().join("proc/77/fd/3")).expect("a link");
        // A volume that device mapper does not describe. It writes nothing until it is resumed.
        write("sys/block/dm-3/dm/name", "pool\n");
        write("sys/block/dm-3/dm/suspended", "1\n");
        root
    }

    fn names_of(operation: Operation, lifted: &[Lifted]) -> Vec<&'static str> {
        let root = bad_machine();
        let answers = ask(operation, lifted, &Sysroot::at(root.path()));
        answers.into_iter().filter(|answer| answer.result.is_err()).map(|answer| answer.about).collect()
    }

    #[test]
    fn each_operation_has_its_reasons() {
        const READ: [&str; 4] = ["kernel lockdown", "swap", "devices", "plugged memory"];
        const REST: [&str; 2] = ["watchdogs", "offline CPUs"];
        assert_eq!(names_of(Checkpoint, &[]), [&READ[..], &REST, &["NFS"]].concat());
        assert_eq!(
            names_of(Snapshot, &[]),
            ["swap", "devices", "watchdogs", "local disks", "raw disks", "volumes", "NFS"]
        );
        assert_eq!(names_of(Migrate, &[]), [&READ[..], &REST, &["fingerprints", "tombstone"]].concat());
        assert_eq!(
            names_of(PowerOff, &[]),
            [&READ[..1], &["lockdown"], &READ[1..], &["restore environment"], &REST, &["fingerprints"]]
                .concat()
        );
    }

    #[test]
    fn a_function_tracer_that_is_off_is_a_reason() {
        let root = tempfile::tempdir().expect("a folder");
        let refused = |text: &str| {
            fs::create_dir_all(root.path().join("proc/sys/kernel")).expect("a folder");
            fs::write(root.path().join("proc/sys/kernel/ftrace_enabled"), text).expect("a file");
            refuse_without_ftrace(&Sysroot::at(root.path())).map_err(|error| error.code)
        };
        assert_eq!((refused("1\n"), refused("0\n")), (Ok(()), Err(Some(Code::SnapshotDevices))));
    }

    /// The machine would be off when the restore environment says so.
    #[test]
    fn a_restore_that_would_be_refused_is_a_reason() {
        let refused = |file: &str, text: &str| -> Vec<&'static str> {
            let root = tempfile::tempdir().expect("a folder");
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
            fs::create_dir_all(root.path().join("proc/self")).expect("a folder");
            fs::write(root.path().join("proc/self/mountinfo"), "").expect("a file");
            let answers = [PowerOff, Migrate, Checkpoint, Snapshot].map(|operation| {
                let all = ask(operation, &[], &Sysroot::at(root.path()));
                all.into_iter().find(|answer| answer.result.is_err() && answer.about != "tombstone")
            });
            answers.into_iter().map(|answer| answer.map_or("", |answer| answer.about)).collect()
        };
        let lockdown = "sys/kernel/security/lockdown";
        assert_eq!(refused(lockdown, "none [integrity] confidentiality"), ["lockdown", "", "", ""]);
        assert_eq!(refused(lockdown, "[none] integrity confidentiality"), [""; 4]);
        let online = "sys/devices/system/cpu/online";
        let many = "number of CPUs";
        assert_eq!(refused(online, "0-505"), [""; 4]);
        assert_eq!(refused(online, "0-506"), [many, many, many, ""]);
    }

    #[test]
    fn an_array_whose_metadata_a_program_writes_is_a_reason_for_all() {
        let root = tempfile::tempdir().expect("a folder");
        let write = |file: &str, text: &str| {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        };
        write("proc/self/mountinfo", "");
        write("sys/block/md126/md/array_state", "clean\n");
        write("sys/block/md126/md/sync_action", "idle\n");
        let refused = |metadata: &str| {
            write("sys/block/md126/md/metadata_version", metadata);
            [PowerOff, Migrate, Checkpoint, Snapshot].map(|operation| {
                let all = [Lifted::Devices, Lifted::Offline, Lifted::Disks, Lifted::Tombstone];
                let mut answers = ask(operation, &all, &Sysroot::at(root.path())).into_iter();
                answers.find(|answer| answer.result.is_err()).map_or("", |answer| answer.about)
            })
        };
        assert_eq!(refused("external:/md127/0\n"), ["arrays"; 4]);
        assert_eq!(refused("1.2\n"), [""; 4]);
    }

    #[test]
    fn options_lift_reasons() {
        let all = [Lifted::Devices, Lifted::Offline, Lifted::Disks, Lifted::Tombstone];
        const NEVER: [&str; 4] = ["kernel lockdown", "swap", "plugged memory", "watchdogs"];
        assert_eq!(names_of(Checkpoint, &all), NEVER);
        assert_eq!(names_of(PowerOff, &all), NEVER);
        assert_eq!(names_of(Snapshot, &all), ["swap", "watchdogs", "NFS"]);
        assert_eq!(names_of(Migrate, &all), [&NEVER[..], &["fingerprints"]].concat());
    }

    #[test]
    fn a_refusal_has_a_code_and_says_that_there_are_more() {
        let root = bad_machine();
        let sysroot = Sysroot::at(root.path());
        for operation in [Checkpoint, PowerOff, Snapshot, Migrate] {
            let answers = ask(operation, &[], &sysroot);
            for error in answers.iter().filter_map(|answer| answer.result.as_ref().err()) {
                assert!(error.code.is_some() && error.hint.is_some(), "{error:?}");
                assert_eq!(error.exit, mercury_control::exit::Exit::Impossible, "{error:?}");
            }
            let refused = refuse(operation, &[], &sysroot).expect_err("refused");
            let first = if operation == Snapshot { Code::SwapInUse } else { Code::LockedDown };
            assert_eq!(refused.code, Some(first));
            assert!(
                refused
                    .hint
                    .is_some_and(|hint| hint.ends_with("There are more reasons: `mercury doctor` lists all"))
            );
        }
    }
}
