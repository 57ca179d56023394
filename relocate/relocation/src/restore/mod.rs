//! `mercury restore`: brings a machine back from its image, in place of this one.
//!
//! Only a small kernel that was booted with `mem=` can restore a machine, because the pages of the
//! image need their own addresses. [`environment`] makes such a restore environment from this
//! system's own kernel; [`init`] is its first process. There the driver loads every page of the
//! image to its own address, and the machine goes on after the instant at which the image was made.

pub mod beside;
pub mod environment;
pub mod fit;
pub mod init;
pub mod kernel;
pub mod menu;
pub mod microcode;
pub mod place;
pub mod prepared;
mod size;

use crate::{
    images::{self, Image},
    options::RestoreOptions,
};
use environment::Purpose;
use mercury_abi::restart::{
    LoadEntry, MERCURY_RANGE_FREE, MERCURY_RANGE_KEPT, MERCURY_RESTART_FIVE_LEVEL, MERCURY_RESTART_X2APIC,
    RestartCpu, RestartRange,
};
use mercury_control::{
    access,
    device::{Access, Device, Restart},
    error::{Error, Result},
    exit::Exit,
    interrupt::Deferred,
    lockdown, module,
    output::{Render, Text},
    say::Say,
    sysroot::Sysroot,
};
use mercury_image::{Chunk, Frame, Kind, Machine};
use mercury_quiesce::{describe, patient};
use place::Place;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Least memory of a restore environment, in MiB.
pub const MEMORY_LEAST_MIB: u64 = 64;
/// The memory of a restore environment that does not need more, in MiB.
const USUAL_MEMORY_MIB: u64 = 128;
/// Time for disks besides the image's to appear in the restore environment.
const DISKS_PATIENCE: std::time::Duration = std::time::Duration::from_secs(30);

/// The prepared restore environment.
#[derive(Clone, Debug, Serialize)]
pub struct Prepared {
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    pub command_line: String,
    /// Its entry in the boot menu, if one was made.
    pub boot_menu: Option<menu::Made>,
    /// Memory of its kernel.
    #[serde(skip)]
    memory_mib: u64,
}

impl Render for Prepared {
    fn render(&self, to: &mut Text) {
        to.line(format!("kernel: {}", self.kernel.display()));
        to.line(format!("initial RAM disk: {}", self.initramfs.display()));
        to.wrapped("command line: ", &self.command_line);
        if let Some(made) = &self.boot_menu {
            made.render(to);
        }
    }
}

/// Checks the image, and prepares or starts the restore environment.
///
/// # Errors
///
/// Returns an error if the image is damaged or does not fit, or this machine cannot restore it.
/// Nothing was given up then.
pub fn run(args: &RestoreOptions, say: Say<'_>) -> Result<Exit> {
    access::need_root("restore")?;
    if args.here {
        return bring_back(args).map(|()| Exit::Done);
    }
    patient::reach(&args.image)?;
    let sysroot = Sysroot::default();
    if args.prepare.is_none() {
        lockdown::refuse_restore("restore", &sysroot)?;
    }
    let place = Place::of(&args.image, &sysroot)?;
    let purpose = purpose(args, &place)?;
    let image = args.image.as_path();
    if let Some(folder) = &args.prepare {
        let prepared = environment::write(&purpose, folder, &sysroot)?;
        if let Err(error) = prepared::add(folder, image, prepared.memory_mib, &sysroot) {
            eprintln!(
                "note: it could not be recorded ({error}), so `mercury checkpoint --poweroff` does not notice \
                 if it has to be prepared again"
            );
        }
        say.done(&prepared);
        return Ok(Exit::Done);
    }
    let made = environment::make(&purpose, &sysroot)?;
    let (machine, room) = verify(image, made.memory)?;
    let mut reasons = fit::differences(&machine, &describe::describe(&sysroot));
    reasons.extend(room.lacking());
    let offline = sysroot.offline_cpus();
    if !offline.is_empty() {
        reasons.push(format!("CPUs {offline} are present and offline"));
    }
    let (cpus, online) = (machine.cpus.len(), sysroot.online_cpus().iter().count());
    if cpus != online {
        reasons.push(format!("{online} CPUs are online, {cpus} were in the image's machine"));
    }
    refuse(image, reasons)?;
    refuse_disks(args, &machine)?;
    environment::start(environment::load(&made, &sysroot)?)?;
    Ok(Exit::Done)
}

/// Returns the memory of the environment that would restore an image, in MiB. It is the one that was prepared
/// for the image, or else the one that would be made now.
///
/// # Errors
///
/// Returns an error if that environment would refuse the image, or none can be made.
pub fn memory_of_environment(image: Option<&Path>, module: Option<&Path>, sysroot: &Sysroot) -> Result<u64> {
    if let Some(prepared) = image.map(|image| prepared::memory_mib(image, sysroot)).transpose()?.flatten() {
        return Ok(prepared);
    }
    kernel_s_file(sysroot)?;
    let args = RestoreOptions { module: module.map(Path::to_owned), ..RestoreOptions::default() };
    // An image on another host is copied to a place that is not known yet.
    let purpose = match image.and_then(|image| Place::of(image, sysroot).ok()) {
        Some(place) => purpose(&args, &place)?,
        None => Purpose { module, usual_memory: USUAL_MEMORY_MIB, ..Purpose::default() },
    };
    Ok(environment::make(&purpose, sysroot).map_err(no_environment)?.memory)
}

/// Returns the file of the kernel that an environment of now would have.
fn kernel_s_file(sysroot: &Sysroot) -> Result<PathBuf> {
    kernel::image(sysroot).map_err(|error| {
        let remedy = error.hint.clone().unwrap_or_default();
        no_environment(error).hint(format!(
            "{remedy}; or go on with --force-devices, for an image that only another host brings back (`mercury \
             restore --as-guest`)"
        ))
    })
}

fn no_environment(mut error: Error) -> Error {
    error.message = format!("no restore environment can be made: {}", error.message);
    error
}

/// Returns the purpose of the restore environment.
fn purpose<'a>(args: &'a RestoreOptions, place: &Place) -> Result<Purpose<'a>> {
    let force = args.force_disks.then(|| init::FORCE_DISKS.to_owned());
    let file = serde_json::to_vec(place)
        .map_err(|error| Error::fault(format!("the image's place cannot be encoded: {error}")))?;
    Ok(Purpose {
        memory: args.memory,
        usual_memory: USUAL_MEMORY_MIB,
        module: args.module.as_deref(),
        words: [format!("{}={}", init::WORD, place.word())].into_iter().chain(force).collect(),
        disks: place.disk().into_iter().collect(),
        cards: place.card().into_iter().collect(),
        modules: place.modules(),
        files: vec![(init::PLACE, file)],
        menu_title: args.boot_menu.then(|| format!("Mercury: restore {}", args.image.display())),
    })
}

/// Refuses disks that have changed since the instant, because memory must never be restored beside
/// them.
fn refuse_disks(args: &RestoreOptions, machine: &Machine) -> Result<()> {
    let changed = fit::changed_disks(&machine.file_systems);
    if changed.is_empty() || args.force_disks {
        return Ok(());
    }
    let text = format!("the disks are not as they were at the instant: {}", changed.join("; "));
    Err(Error::new(Exit::Failed, text).hint(
        "put back the snapshot that was made with the image; if the disks are mounted, unmount them, or \
         start from the boot menu (--prepare). --force-disks restores anyway, and destroys file systems",
    ))
}

/// Reads the whole image. Returns the description of its machine, and the room for its frames, if
/// the image is intact.
fn verify(image: &Path, memory_mib: u64) -> Result<(Machine, fit::Room)> {
    let mut opened = Image::open(image)?;
    images::refuse_incremental(image, opened.machine())?;
    images::tell_of_return(&opened);
    let mut room = fit::Room::new(&opened.machine().ranges, memory_mib);
    opened.read("checking the image", &Deferred::begin(), |chunk| {
        chunk.frames.iter().for_each(|frame| room.add(frame));
        Ok(())
    })?;
    Ok((opened.machine().clone(), room))
}

fn refuse(image: &Path, reasons: Vec<String>) -> Result<()> {
    if reasons.is_empty() {
        return Ok(());
    }
    let text = format!("{} does not fit this machine: {}", image.display(), reasons.join("; "));
    Err(Error::new(Exit::Impossible, text)
        .hint("restore it where it was made, or on a machine equal to that one"))
}

/// Loads the image in the restore environment, and goes on in it. Returns only if that fails. The
/// machine is started only after all of the image has been read and verified.
fn bring_back(args: &RestoreOptions) -> Result<()> {
    let mut image = Image::open(&args.image)?;
    let machine = image.machine().clone();
    images::refuse_incremental(&args.image, &machine)?;
    refuse(&args.image, fit::differences(&machine, &describe::describe(&Sysroot::default())))?;
    fit::wait_for_disks(&machine.file_systems, DISKS_PATIENCE);
    refuse_disks(args, &machine)?;
    module::insert(args.module.as_deref(), &Sysroot::default())?;
    let device = Device::open(Access::Control)?;
    device.restore_begin(&restart(&machine))?;
    image.read("loading", &Deferred::begin(), |chunk| load(&device, &chunk))?;
    device.restore_go()
}

fn load(device: &Device, chunk: &Chunk) -> Result<()> {
    let entry = |frame: &Frame| LoadEntry { frame_phys: frame.phys, source: frame.source_word() };
    let entries: Vec<_> = chunk.frames.iter().map(entry).collect();
    device.restore_load(&entries, &chunk.data)
}

/// Describes a machine for the driver.
pub fn restart(machine: &Machine) -> Restart {
    let kind = |kind| if kind == Kind::Kept { MERCURY_RANGE_KEPT } else { MERCURY_RANGE_FREE };
    let flag = |set, flag| if set { flag } else { 0 };
    Restart {
        flags: flag(machine.resume.five_level, MERCURY_RESTART_FIVE_LEVEL)
            | flag(machine.resume.x2apic, MERCURY_RESTART_X2APIC),
        resume_virt: machine.resume.virt,
        resume_phys: machine.resume.phys,
        cpus: machine
            .cpus
            .iter()
            .map(|cpu| RestartCpu { cpu: cpu.cpu, apic_id: cpu.apic_id, saved_phys: cpu.saved_phys })
            .collect(),
        ranges: machine
            .ranges
            .iter()
            .map(|range| RestartRange {
                start_phys: range.start_phys,
                pages: range.pages,
                kind: kind(range.kind),
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The machine would be off when the kernel is missed.
    #[test]
    fn a_kernel_whose_file_is_gone_or_another_is_refused() {
        let root = tempfile::tempdir().expect("a folder");
        let put = |name: &str, text: &str| {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            std::fs::write(path, text).expect("a file");
        };
        let sysroot = Sysroot::at(root.path());
        put("proc/sys/kernel/osrelease", "6.1.0-37-amd64\n");
        put("image", "");
        let refused = |expected: &str| {
            for image in [None, Some(root.path().join("image"))] {
                let error = memory_of_environment(image.as_deref(), None, &sysroot).expect_err("refused");
                assert!(error.message.contains(expected), "{error}");
                assert!(error.hint.is_some_and(|hint| hint.contains("--as-guest")), "no hint");
            }
            let told = prepared::refusals(&sysroot);
            assert!(matches!(told.as_slice(), [one] if one.message.contains(expected)), "{told:?}");
        };
        refused("no restore environment can be made: the kernel 6.1.0-37-amd64 is not in /boot");
        put("boot/vmlinuz-6.1.0-37-amd64", "another build");
        refused("and the kernel that runs");
    }
}
