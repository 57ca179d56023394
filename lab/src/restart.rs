//! Machines that are brought back from an image: the preparation, the work that goes on across the
//! restore, and the checks of both.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant, SystemTime},
};

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{
    command::patient,
    error::{Context, Error, Result},
    link::System,
    machine::{Boot, Machine},
};

/// Time limit of a checkpoint, and of work that was asked to end.
const LIMIT: Duration = Duration::from_secs(180);

/// Time for which a count may stand still, in time that the emulator works. A TCP connection waits
/// about as long as its peer was away before it tries again.
const STILL_LIMIT: Duration = Duration::from_secs(60);

/// The same limit in wall time is so many times longer. A stopped machine does not work, and hosts
/// are shared.
const WALL_TIME: u32 = 5;

/// Work that goes on by itself. Each script writes its progress to `/run/NAME`, and errors to
/// `/run/NAME.wrong`. Some scripts write their result to `/run/NAME.ended` when `/run/end` exists.
pub mod script {
    /// The common beginning of all scripts.
    pub(super) const SAY: &str = include_str!("../guest/restart/say");
    /// A process that watches its clock.
    pub const CLOCK: &str = include_str!("../guest/restart/clock");
    /// The server for TALK.
    pub const ECHO: &str = include_str!("../guest/restart/echo");
    /// A client on a TCP connection; its argument is the address of ECHO.
    pub const TALK: &str = include_str!("../guest/restart/talk");
    /// The server for TELL.
    pub const HEAR: &str = include_str!("../guest/restart/hear");
    /// A sender that waits for no answer; its argument is the address of HEAR.
    pub const TELL: &str = include_str!("../guest/restart/tell");
    /// A listener for announcements of an address: the address, and the card that had it.
    pub const ANNOUNCED: &str = include_str!("../guest/restart/announced");
    /// A client of PostgreSQL; its argument is its number.
    pub const CLIENT: &str = include_str!("../guest/restart/client");
    /// An NFS server for the machine's own root.
    pub const EXPORTS: &str = include_str!("../guest/restart/exports");
    /// A server of a disk, over NBD.
    pub const BLOCKS: &str = include_str!("../guest/restart/blocks");
    /// The client that attaches the disk of BLOCKS.
    pub const ATTACH_BLOCKS: &str = include_str!("../guest/restart/attach_blocks");
    /// A process with memory that not even the kernel has mapped.
    pub const SECRET: &str = include_str!("../guest/restart/secret");
    pub const CHAIN: &str = include_str!("../guest/restart/chain");
    /// Processes with pipes and shared memory.
    pub const RING: &str = include_str!("../guest/restart/ring");
    /// Builds with `make` and gcc.
    pub const BUILDS: &str = include_str!("../guest/restart/builds");
    /// A reader of a file, past the page cache.
    pub const READS: &str = include_str!("../guest/restart/reads");
}

/// A folder of files on this host, which is removed when this value is dropped.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns the system that restores the machine from an image on `disk`, as the machine's own
/// `mercury` command prepares it.
///
/// # Errors
/// If the command fails, or the files do not reach this host.
pub fn prepare(machine: &Machine, disk: &str, options: &str) -> Result<(Boot, Folder)> {
    let (boot, folder, _) = prepared(machine, &format!("restore {options} {disk}"))?;
    Ok((boot, folder))
}

/// Returns the system that a `mercury` command prepares for a boot loader, and the command's JSON.
///
/// # Errors
/// If the command fails, or the files do not reach this host.
pub fn prepared(machine: &Machine, command: &str) -> Result<(Boot, Folder, Value)> {
    put_own_kernel(machine)?;
    let line = format!("mercury {command} --json --prepare /run/restore");
    let said: Value = serde_json::from_str(&machine.sh(&line)?)
        .map_err(|error| Error::Host(format!("`{line}` printed no JSON: {error}")))?;
    let folder = Folder(std::env::temp_dir().join(format!("mercury-restore-{}", machine.pid())));
    fs::create_dir_all(&folder.0).context(|| format!("make {}", folder.0.display()))?;
    let fetch = |name: &str| -> Result<PathBuf> {
        let path = folder.0.join(name);
        fs::write(&path, machine.get(&format!("/run/restore/{name}"))?)
            .context(|| format!("write {}", path.display()))?;
        Ok(path)
    };
    let (kernel, initramfs) = (fetch("vmlinuz")?, fetch("initramfs")?);
    // The files would be in the image.
    machine.sh("rm -r /run/restore")?;
    let command_line = said["command_line"].as_str().unwrap_or_default().to_owned();
    Ok((Boot { kernel, initramfs, command_line }, folder, said))
}

/// Puts a kernel of the lab's own where the machine's command looks for the running kernel.
fn put_own_kernel(machine: &Machine) -> Result<()> {
    let Some(kernel) = machine.own_kernel() else { return Ok(()) };
    let image = fs::read(kernel).context(|| format!("read {}", kernel.display()))?;
    machine.put(&format!("/boot/vmlinuz-{}", machine.kernel()), &image, 0o644)
}

/// Starts work and waits until it has made progress. `arguments` are its script's.
///
/// # Errors
/// If the work makes no progress.
pub fn start(machine: &impl System, name: &str, script: &str, arguments: &str) -> Result<()> {
    machine.link().put(&format!("/run/{name}.py"), format!("{}{script}", script::SAY).as_bytes(), 0o644)?;
    machine.link().sh(&format!(
        "rm -f /run/{name}; setsid python3 /run/{name}.py {arguments} > /run/{name}.said 2>&1 < /dev/null &"
    ))?;
    let started = format!(
        "for i in $(seq 1200); do test -s /run/{name} && exit; sleep 0.1; done; cat /run/{name}.said; exit 1"
    );
    machine.link().command(&started).timeout(LIMIT).run()?.check().map(drop)
}

/// Returns the progress of work.
///
/// # Errors
/// If the work has not reported any.
pub fn count(machine: &impl System, name: &str) -> Result<u64> {
    let said = machine.link().sh(&format!("cat /run/{name}"))?;
    said.trim().parse().map_err(|_| Error::Host(format!("{name} reported `{said}` instead of a count")))
}

/// Waits until work has progressed further than `before`.
///
/// # Errors
/// If the work does not progress.
pub fn comes_further(machine: &impl System, name: &str, before: u64) -> Result<()> {
    let limit = patient(STILL_LIMIT);
    let (end, worked) = (Instant::now() + limit * WALL_TIME, machine.worked()?);
    while count(machine, name)? <= before {
        if Instant::now() > end || machine.worked()? - worked > limit {
            let said = machine.link().sh(&format!("cat /run/{name}.said"))?;
            let stuck = format!("{name} stands still at {before}: {said}");
            return Err(machine.link().blame(Error::Unhealthy(stuck)));
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    nothing_wrong(machine)
}

/// Checks that no work has recorded an error.
///
/// # Errors
/// With the errors.
pub fn nothing_wrong(machine: &impl System) -> Result<()> {
    let wrong = machine.link().sh("cat /run/*.wrong 2> /dev/null || true")?;
    if wrong.is_empty() { Ok(()) } else { Err(machine.link().blame(Error::Unhealthy(wrong))) }
}

/// Ends work and returns its results.
///
/// # Errors
/// If the work does not end, or recorded an error.
pub fn results(machine: &impl System, names: &[&str]) -> Result<Vec<String>> {
    machine.link().sh("touch /run/end")?;
    let result = |name: &&str| {
        let ended = format!(
            "for i in $(seq 1800); do test -s /run/{name}.ended && exec cat /run/{name}.ended; sleep 0.1; \
             done; cat /run/{name}.said; exit 1"
        );
        let output = machine.link().command(&ended).timeout(LIMIT * 2).run()?.check()?;
        Ok(output.stdout.trim().to_owned())
    };
    let all = names.iter().map(result).collect::<Result<_>>()?;
    nothing_wrong(machine)?;
    machine.link().sh("rm /run/end")?;
    Ok(all)
}

/// Checks the result of CHAIN: this host computes as many links.
///
/// # Errors
/// If the results differ.
pub fn check_chain(result: &str) -> Result<()> {
    let (links, end) = result.split_once(' ').unwrap_or_default();
    let links = links.parse::<u64>().unwrap_or(0);
    let expected = (0..links).fold([0; 32], |link: [u8; 32], _| Sha256::digest(link).into());
    let expected: String = expected.iter().map(|byte| format!("{byte:02x}")).collect();
    if links > 0 && end == expected {
        return Ok(());
    }
    Err(Error::Unhealthy(format!("{links} hashes of hashes end in {end}, not in {expected}")))
}

/// Returns the boot ID of a machine's kernel.
///
/// # Errors
/// If the boot ID cannot be read.
pub fn boot_id(machine: &impl System) -> Result<String> {
    machine.link().sh("cat /proc/sys/kernel/random/boot_id")
}

/// Writes the machine to `disk`. The machine is off in the end, and the disks are as they were at
/// the instant.
///
/// # Errors
/// If the machine is not off in time.
pub fn checkpoint(machine: &Machine, options: &str, disk: &str) -> Result<()> {
    machine.sh("modprobe -r kvm_amd 2> /dev/null || true")?;
    put_own_kernel(machine)?;
    let mut checkpoint = machine.spawn(&format!("mercury checkpoint --poweroff {options} {disk}"))?;
    machine.wait_shutdown(LIMIT).map(drop).inspect_err(|_| {
        println!("{:?}", checkpoint.errors_so_far());
    })
}

/// Checks that a machine has the boot ID `before`, and works.
///
/// # Errors
/// With the check that failed.
pub fn is_well(machine: &impl System, before: &str) -> Result<()> {
    let unhealthy = |what: String| Err(machine.link().blame(Error::Unhealthy(what)));
    if boot_id(machine)? != before {
        return unhealthy("it has booted, and was not brought back".into());
    }
    comes_further(machine, "clock", count(machine, "clock")?)?;
    knows_the_time(machine, "after")?;
    let log = machine.link().sh("dmesg")?;
    if log.contains("Call Trace") || log.contains("random generator could not") {
        return unhealthy(log);
    }
    machine.link().sh("mount | grep -q ' / .*[(,]ro[,)]' || { echo written > /root/after && sync; }")?;
    machine.link().sh("! dmesg | grep -i 'ext4.*error'").map(drop)
}

/// Checks that the machine's wall clock agrees with this host's.
///
/// # Errors
/// If the clocks differ.
pub fn knows_the_time(machine: &impl System, when: &str) -> Result<()> {
    let now = || SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs();
    let before = now();
    let theirs = machine.link().sh("echo $(date +%s) $(cut -d ' ' -f 1 /proc/uptime)")?;
    let (time, uptime) = theirs.split_once(' ').unwrap_or_default();
    // The machine may have taken long to answer.
    let right = before - 3..=now() + 3;
    if time.parse::<u64>().is_ok_and(|time| right.contains(&time)) {
        return Ok(());
    }
    let wrong = format!("the time {when} is {time}, not in {right:?}; up for {uptime} s");
    Err(machine.link().blame(Error::Unhealthy(wrong)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_followed() {
        // The same value as in `mercury-workload compute`.
        let end = "36c1cb4f826ae42c";
        let error = check_chain("1000 00").unwrap_err().to_string();
        assert!(error.contains(&format!("not in {end}")), "{error}");
        assert!(check_chain("").is_err() && check_chain("0 ").is_err());
    }
}
