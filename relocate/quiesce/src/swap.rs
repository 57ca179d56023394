//! Swap areas on disks. Pages that are swapped out to a disk are in no image. So these areas are
//! switched off before the instant, which reads back their pages, and on again after it. Areas in
//! zram are memory, and stay on.
//!
//! Between the last check and the instant nothing may be swapped out. The driver compares the
//! number of free swap slots when no CPU runs anything else ([`Off::pages`]), and a change in
//! between is noticed here ([`Off::refuse_changes`]).

use super::{
    control_groups::{self, Kills},
    layers,
    mounts::unescaped,
    patient, reachable,
};
use crate::undo::{Area, Undo, UndoProcess};
use mercury_abi::code::Code;
use mercury_abi::ioctl::MERCURY_SWAP_IN_MEMORY;
use mercury_control::{
    device::Device,
    error::{Error, Result},
    exit::Exit,
    interrupt,
    output::bytes,
    progress,
    sysroot::Sysroot,
};
use mercury_image::SwapArea;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::FileTypeExt,
    path::PathBuf,
    time::Duration,
};

const TABLE: &str = "proc/swaps";
/// Memory that stays available when everything has been read back.
const RESERVE: u64 = 64 << 20;
/// Time for a disk to give back at least one page.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time before progress is shown.
const QUIET: Duration = Duration::from_secs(2);
/// `SWAP_FLAG_PREFER` of linux/swap.h: the low bits are a priority.
const PREFER: i32 = 0x8000;

impl Area {
    /// Returns true if the area lies in memory: zram without a disk behind it.
    fn is_memory(&self, sysroot: &Sysroot) -> bool {
        let name = self.path.strip_prefix("/dev").unwrap_or(&self.path).to_string_lossy().into_owned();
        let backing = sysroot.text(&format!("sys/block/{name}/backing_dev"));
        name.starts_with("zram") && backing.is_none_or(|device| device == "none")
    }

    /// Switches the area on again. An area that is on is no error.
    ///
    /// # Errors
    ///
    /// Returns an error if it is no swap area any more, or cannot be read.
    pub fn switch_on(&self) -> io::Result<()> {
        let flags = if self.priority < 0 { 0 } else { PREFER | self.priority.min(PREFER - 1) };
        match patient::swap_on(&self.path, flags) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(()),
            result => result,
        }
    }

    /// Switches the area off, which reads back its pages, as long as that makes progress, the kernel
    /// ends no task for it, and no signal asks for an end.
    fn switch_off(&self, kills: &Kills, sysroot: &Sysroot) -> io::Result<()> {
        let mut left = Remains::default();
        let reads_back = self.used > 0 || self.left(sysroot) > 0;
        let kills_rose = || reads_back && kills.rose(sysroot);
        let get_on = |elapsed: Duration| {
            let used = self.left(sysroot);
            if elapsed > QUIET {
                progress::line(&format!("reading back {} from {}", bytes(used), self.path.display()));
            }
            left.goes_on(used, elapsed) && !interrupt::requested() && !kills_rose()
        };
        let result = patient::swap_off(&self.path, get_on);
        progress::line("");
        match result {
            Err(_) if interrupt::requested() => Err(io::ErrorKind::Interrupted.into()),
            _ if kills_rose() => {
                let text = format!(
                    "the kernel ended a program{} for lack of memory meanwhile",
                    kills.named(sysroot)
                );
                Err(io::Error::new(io::ErrorKind::OutOfMemory, text))
            }
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                let (left, patience) = (bytes(self.left(sysroot)), PATIENCE.as_secs());
                let text = format!("its disk has given none of the last {left} for {patience} s");
                Err(io::Error::new(io::ErrorKind::TimedOut, text))
            }
            result => result,
        }
    }

    /// Returns the bytes that are still swapped out to it.
    fn left(&self, sysroot: &Sysroot) -> u64 {
        let table = areas(&sysroot.text(TABLE).unwrap_or_default());
        table.iter().find(|area| area.path == self.path).map_or(0, |area| area.used)
    }
}

/// The remaining pages of an area that is being switched off.
#[derive(Debug, Default)]
struct Remains {
    used: Option<u64>,
    /// Time at which the last page was read back.
    since: Duration,
}

impl Remains {
    /// Returns false if there was no progress for too long.
    fn goes_on(&mut self, used: u64, elapsed: Duration) -> bool {
        if self.used != Some(used) {
            (self.used, self.since) = (Some(used), elapsed);
        }
        elapsed < self.since + PATIENCE
    }
}

/// Parses a table in the form of /proc/swaps.
fn areas(table: &str) -> Vec<Area> {
    let area = |line: &str| {
        let mut fields = line.split_whitespace();
        let path = unescaped(fields.next()?).into();
        let used: u64 = fields.nth(2)?.parse().ok()?;
        Some(Area { path, used: used * 1024, priority: fields.next()?.parse().ok()? })
    };
    table.lines().skip(1).filter_map(area).collect()
}

/// Returns the paths of swap areas that are on.
#[must_use]
pub fn paths(sysroot: &Sysroot) -> Vec<PathBuf> {
    areas(&sysroot.text(TABLE).unwrap_or_default()).into_iter().map(|area| area.path).collect()
}

/// Returns the areas on disks.
fn on_disks(table: &str, sysroot: &Sysroot) -> Vec<Area> {
    let mut found = areas(table);
    found.retain(|area| !area.is_memory(sysroot));
    found
}

fn named(areas: &[Area]) -> String {
    areas.iter().map(|area| area.path.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Refuses a machine that has no room for pages that are swapped out to its disks.
///
/// # Errors
///
/// Returns an error if reading them back would leave hardly any memory, to the machine or to a control
/// group with a limit.
pub fn refuse(sysroot: &Sysroot) -> Result<()> {
    let mut found = on_disks(&sysroot.text(TABLE).unwrap_or_default(), sysroot);
    found.retain(|area| area.used > 0);
    let used: u64 = found.iter().map(|area| area.used).sum();
    let available = sysroot.available_memory().unwrap_or(0);
    if used == 0 {
        return Ok(());
    }
    if used + RESERVE <= available {
        return refuse_tight(used, sysroot);
    }
    let text = format!(
        "{} of memory are swapped out to {}, which is in no image, and only {} are available to read it back",
        bytes(used),
        named(&found),
        bytes(available)
    );
    Err(Error::coded(Code::SwapInUse, text)
        .hint("stop programs until there is room for these pages in memory, and try again"))
}

/// Refuses a machine on which the kernel would end a task of a control group whose limit is too low.
fn refuse_tight(used: u64, sysroot: &Sysroot) -> Result<()> {
    let tight = control_groups::tight(used, sysroot);
    let Some(first) = tight.first() else { return Ok(()) };
    let described: Vec<_> = tight.iter().map(control_groups::Tight::describe).collect();
    let text = format!(
        "reading back what is swapped out would have the kernel end programs: {}",
        described.join("; ")
    );
    Err(Error::coded(Code::SwapInUse, text).hint(format!(
        "for the time of the command, raise each limit (the first one to {} in {}; a unit of systemd by \
         `systemctl set-property --runtime UNIT MemoryMax=…`), or stop programs of the group",
        first.wanted, first.file
    )))
}

/// Swap areas on disks that are off until this is dropped.
#[derive(Debug)]
pub struct Off {
    areas: Vec<Area>,
    /// The table as opened at [`Self::pages`]: the kernel reports each change since then.
    table: Option<File>,
}

impl Off {
    /// Switches them off, and says so if pages have to be read back; the undo process switches them
    /// on if this process does not.
    ///
    /// # Errors
    ///
    /// Returns an error if there is no room for their pages, or one cannot be switched off; the
    /// others are on again then.
    pub fn switch(guard: &mut UndoProcess, sysroot: &Sysroot) -> Result<Self> {
        refuse(sysroot)?;
        let found = on_disks(&sysroot.text(TABLE).unwrap_or_default(), sysroot);
        let used: u64 = found.iter().map(|area| area.used).sum();
        if used > 0 {
            let (used, named) = (bytes(used), named(&found));
            eprintln!(
                "note: {used} are swapped out to {named}; they are read back, \
                 and swap is off until the instant"
            );
        }
        let mut off = Self { areas: Vec::new(), table: None };
        for area in found {
            let kills = Kills::now(sysroot);
            let failed = |error: io::Error| {
                let is_interrupted = error.kind() == io::ErrorKind::Interrupted;
                let exit = if is_interrupted { Exit::Interrupted } else { Exit::Failed };
                let text = format!("swap on {} could not be switched off: {error}", area.path.display());
                // The kernel's own errors have a number.
                let has_ended = error.kind() == io::ErrorKind::OutOfMemory && error.raw_os_error().is_none();
                let hint = if has_ended {
                    "nothing else was changed; `dmesg` names the program; raise the limit of its group, and \
                     try again"
                } else {
                    "nothing was changed; free some memory, or try `swapoff -a`"
                };
                Error::new(exit, text).hint(hint)
            };
            guard.will(&Undo::SwapOn(area.clone())).map_err(failed)?;
            if let Err(error) = area.switch_off(&kills, sysroot) {
                // The kernel may have come to the end just now. An area that is on is no error.
                let _ = area.switch_on();
                return Err(failed(error));
            }
            off.areas.push(area);
        }
        Ok(off)
    }

    /// Describes the areas on block devices. Those in files go with their file systems.
    #[must_use]
    pub fn describe(&self, sysroot: &Sysroot) -> Vec<SwapArea> {
        let is_device = |area: &&Area| {
            std::fs::metadata(&area.path).is_ok_and(|found| found.file_type().is_block_device())
        };
        let describe = |area: &Area| SwapArea {
            device: area.path.display().to_string(),
            disks: layers::disks(&area.path, sysroot).into_iter().flatten().collect(),
            goes_along: reachable::goes_along(&area.path, sysroot),
        };
        self.areas.iter().filter(is_device).map(describe).collect()
    }

    /// Returns the number that the driver must find at the instant
    /// ([`mercury_abi::ioctl::SnapshotRequest::swap_pages`]).
    ///
    /// # Errors
    ///
    /// Returns an error if an area on a disk is on again.
    pub fn pages(&mut self, sysroot: &Sysroot) -> Result<u64> {
        let mut text = String::new();
        // A kernel without swap has no table.
        self.table = File::open(sysroot.path(TABLE)).ok();
        let read = self.table.as_mut().map_or(Ok(0), |table| table.read_to_string(&mut text));
        read.map_err(|error| {
            Error::new(Exit::Failed, format!("/proc/swaps cannot be read: {error}"))
                .hint("see in `dmesg` why the kernel refuses, and try again")
        })?;
        let found = on_disks(&text, sysroot);
        if !found.is_empty() {
            return Err(switched(&named(&found)));
        }
        Ok(if areas(&text).is_empty() { 0 } else { MERCURY_SWAP_IN_MEMORY })
    }

    /// Refuses an instant during which swap was switched on or off, since the call of
    /// [`Self::pages`].
    ///
    /// # Errors
    ///
    /// Returns an error in that case.
    pub fn refuse_changes(&self) -> Result<()> {
        let Some(table) = &self.table else { return Ok(()) };
        let mut polled = [PollFd::new(table, PollFlags::PRI)];
        let result = rustix::event::poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        match result {
            Ok(_) if !polled[0].revents().contains(PollFlags::PRI) => Ok(()),
            _ => Err(switched("an area")),
        }
    }
}

fn switched(what: &str) -> Error {
    Error::new(Exit::Failed, format!("swap on {what} was switched on or off meanwhile"))
        .hint("nothing was kept; find the program that runs swapon or swapoff on this machine, and try again")
}

impl Drop for Off {
    fn drop(&mut self) {
        for area in self.areas.drain(..) {
            if let Err(error) = area.switch_on() {
                let path = area.path.display();
                eprintln!(
                    "mercury: swap on {path} could not be switched on again: {error}; try `swapon {path}`"
                );
            }
        }
    }
}

/// Ends a snapshot at whose instant memory may have been swapped out.
pub fn end_if_swap_changed(device: &Device, swap: &Off) -> Result<()> {
    swap.refuse_changes().inspect_err(|_| drop(device.snapshot_end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: &str = "Filename\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
        /dev/zram0 partition 1048572 4096 100\n/dev/vda2 partition 1048572 12 -2\n/swap\\040file file 512 0 \
        5\n";

    fn with(table: &str, available_kib: u64, backing: Option<&str>) -> (tempfile::TempDir, Sysroot) {
        let root = tempfile::tempdir().expect("a folder");
        let put = |name: &str, text: &str| {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            std::fs::write(path, text).expect("a file");
        };
        put(TABLE, table);
        put("proc/meminfo", &format!("MemAvailable: {available_kib} kB\n"));
        backing.iter().for_each(|text| put("sys/block/zram0/backing_dev", text));
        let sysroot = Sysroot::at(root.path());
        (root, sysroot)
    }

    #[test]
    fn areas_are_read() {
        let found = areas(BOTH);
        assert_eq!(found[1], Area { path: "/dev/vda2".into(), used: 12 << 10, priority: -2 });
        assert_eq!(found[2].path, std::path::Path::new("/swap file"));
        assert_eq!(areas(""), []);
    }

    #[test]
    fn zram_is_memory_unless_it_writes_to_a_disk() {
        for (backing, expected) in [(None, 2), (Some("none\n"), 2), (Some("/dev/sdb\n"), 3)] {
            let (_root, sysroot) = with(BOTH, 0, backing);
            assert_eq!(on_disks(BOTH, &sysroot).len(), expected, "{backing:?}");
        }
    }

    #[test]
    fn room_is_wanted_for_what_is_swapped_out_to_disks() {
        let (_root, sysroot) = with(BOTH, (64 << 10) + 12, None);
        assert_eq!(refuse(&sysroot), Ok(()));
        let (_root, sysroot) = with(BOTH, (64 << 10) + 11, None);
        let error = refuse(&sysroot).expect_err("refused");
        assert!(error.message.contains("12.0 KiB of memory are swapped out to /dev/vda2, which"), "{error}");
        let unused = BOTH.replace(" 12 ", " 0 ");
        assert_eq!(refuse(&with(&unused, 0, None).1), Ok(()));
    }

    /// swapoff(2) charges what it reads back to control groups, and the kernel ends tasks of those
    /// without room.
    #[test]
    fn room_is_wanted_in_control_groups() {
        use crate::control_groups::tests::{group, mount, put};
        let (_root, sysroot) = with(&BOTH.replace(" 12 ", " 524288 "), 1 << 20, None);
        mount(&sysroot);
        group(&sysroot, "/db.slice", [512, 212, 300]);
        let error = refuse(&sysroot).expect_err("refused");
        assert_eq!(error.code, Some(Code::SwapInUse));
        assert!(error.message.contains("control group /db.slice may have 512 MiB, cannot"), "{error}");
        let hint = error.hint.expect("a hint");
        assert!(hint.contains("the first one to 570425344 in /sys/fs/cgroup/db.slice/memory.max"), "{hint}");
        group(&sysroot, "/db.slice", [544, 212, 298]);
        assert_eq!(refuse(&sysroot), Ok(()));
        // A task that is ended all the same is told.
        put(&sysroot, &[("proc/vmstat", "oom_kill 1\n".into())]);
        let kills = Kills::now(&sysroot);
        put(&sysroot, &[("proc/vmstat", "oom_kill 2\n".into())]);
        let error = areas(BOTH)[1].switch_off(&kills, &sysroot).expect_err("no such area");
        assert!(error.to_string().contains("ended a program for lack of memory"), "{error}");
        // An area that holds nothing is not the reason.
        let error = areas(BOTH)[2].switch_off(&kills, &sysroot).expect_err("no such area");
        assert!(!error.to_string().contains("ended a program"), "{error}");
    }

    #[test]
    fn a_disk_that_gives_nothing_back_is_given_up() {
        let mut left = Remains::default();
        let seconds = Duration::from_secs;
        assert!(left.goes_on(7, seconds(1)) && left.goes_on(7, seconds(30)));
        assert!(left.goes_on(6, seconds(30)) && left.goes_on(6, seconds(59)));
        assert!(!left.goes_on(6, seconds(60)));
        let (_root, sysroot) = with(BOTH, 0, None);
        let area = &areas(BOTH)[1];
        assert_eq!(area.left(&sysroot), 12 << 10);
        let error = area.switch_off(&Kills::now(&sysroot), &sysroot).expect_err("no such area");
        assert!(matches!(error.raw_os_error(), Some(libc::EPERM | libc::EINVAL | libc::ENOENT)), "{error}");
    }

    #[test]
    fn swap_in_files_is_no_area_on_a_device() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("swap");
        std::fs::write(&file, "").expect("a file");
        let area = |path: &std::path::Path| Area { path: path.into(), used: 0, priority: 0 };
        let off = |areas| std::mem::ManuallyDrop::new(Off { areas, table: None });
        let none = off(vec![area(&file), area(&folder.path().join("gone"))]);
        assert_eq!(none.describe(&Sysroot::default()), []);
    }

    #[test]
    fn the_instant_is_told_what_to_find() {
        let mut off = Off { areas: Vec::new(), table: None };
        let zram = BOTH.lines().take(2).collect::<Vec<_>>().join("\n");
        let (_root, sysroot) = with(&zram, 0, None);
        assert_eq!(off.pages(&sysroot), Ok(MERCURY_SWAP_IN_MEMORY));
        let (_root, sysroot) = with(BOTH.lines().next().expect("a line"), 0, None);
        assert_eq!(off.pages(&sysroot), Ok(0));
        let (_root, sysroot) = with(BOTH, 0, None);
        let error = off.pages(&sysroot).expect_err("refused");
        assert!(error.message.contains("/dev/vda2, /swap file was switched"), "{error}");
    }
}
