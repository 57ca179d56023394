//! Checks if an image fits this machine: collects every reason against it before anything is given
//! up.

use mercury_abi::{
    code::Code,
    restart::{LANDING_CPUS_MAX, LANDING_LIST_MAX},
};
use mercury_control::{
    error::{Error, Result},
    output::bytes,
    sysroot::Sysroot,
};
use mercury_image::{Device, FileSystem, Frame, Iommu, Kind, Machine, PAGE, Range, Source};
use mercury_quiesce::disks;
use std::{
    thread,
    time::{Duration, Instant},
};

/// Returns the reasons why the machine of an image cannot go on here, except those of its disks.
#[must_use]
pub fn differences(image: &Machine, here: &Machine) -> Vec<String> {
    let mut found = Vec::new();
    if image.kernel != here.kernel {
        found.push(format!("the kernel is “{}”, the image's “{}”", here.kernel, image.kernel));
    }
    if image.mercury != here.mercury {
        found.push(format!("Mercury is {}, the image's {}", here.mercury, image.mercury));
    }
    processor(image, here, &mut found);
    let cpus = image.cpus.len();
    if cpus > LANDING_CPUS_MAX {
        found.push(format!(
            "the image's machine has {cpus} CPUs, and a restore brings back {LANDING_CPUS_MAX}"
        ));
    }
    if image.firmware != here.firmware {
        found.push(memory(image, here));
    }
    devices(image, here, &mut found);
    if let (Some(theirs), Some(ours)) = (&image.iommus, &here.iommus) {
        iommus(theirs, ours, &mut found);
    }
    found
}

/// Refuses a machine whose image a restore environment on the same hardware would refuse.
///
/// # Errors
///
/// Returns an error with all reasons.
pub fn refuse_unrestorable(machine: &Machine, sysroot: &Sysroot) -> Result<()> {
    let reasons = differences(machine, &in_environment(machine, sysroot));
    if reasons.is_empty() {
        return Ok(());
    }
    let text =
        format!("a restore environment on this machine would refuse the image: {}", reasons.join("; "));
    Err(Error::coded(Code::RestoreUnfit, text))
}

/// Predicts the description of this hardware in a restore environment: without devices that only a
/// driver makes, which the environment does not have.
#[must_use]
pub fn in_environment(here: &Machine, sysroot: &Sysroot) -> Machine {
    let is_virtual =
        |device: &Device| sysroot.exists(&format!("sys/bus/pci/devices/{}/physfn", device.address));
    let mut machine = here.clone();
    machine.devices.retain(|device| !is_virtual(device));
    machine
}

fn processor(image: &Machine, here: &Machine, found: &mut Vec<String>) {
    let (theirs, ours) = (&image.processor, &here.processor);
    if (&theirs.vendor, theirs.signature) != (&ours.vendor, ours.signature) {
        let name = |processor: &mercury_image::Processor| {
            let [family, model, stepping] = processor.signature;
            format!("{} (family {family}, model {model}, stepping {stepping})", processor.model)
        };
        found.push(format!("the processor is {}, the image's {}", name(ours), name(theirs)));
    }
    let missing: Vec<_> =
        theirs.flags.iter().filter(|flag| !ours.flags.contains(flag)).map(String::as_str).collect();
    if !missing.is_empty() {
        found.push(format!("the processor lacks {}", missing.join(", ")));
    }
    if theirs.microcode != ours.microcode {
        found.push(format!("the microcode is {}, the image's {}", ours.microcode, theirs.microcode));
    }
}

/// Describes the first difference of the memory maps, which says most.
fn memory(image: &Machine, here: &Machine) -> String {
    let name = |range: &mercury_image::FirmwareRange| {
        format!("{:#x}–{:#x} ({})", range.start_phys, range.last_phys, range.kind)
    };
    let pairs = image.firmware.iter().zip(&here.firmware).find(|(theirs, ours)| theirs != ours);
    match pairs {
        Some((theirs, ours)) => {
            format!("the firmware's memory map has {}, the image's {}", name(ours), name(theirs))
        }
        None => {
            let total = |machine: &Machine| -> u64 {
                let size = |range: &mercury_image::FirmwareRange| {
                    range.last_phys.saturating_sub(range.start_phys).saturating_add(1)
                };
                // Numbers from another machine may be made up.
                machine.firmware.iter().map(size).fold(0, u64::saturating_add)
            };
            format!(
                "the firmware's memory map is of {}, the image's of {}",
                bytes(total(here)),
                bytes(total(image))
            )
        }
    }
}

fn devices(image: &Machine, here: &Machine, found: &mut Vec<String>) {
    let same = |left: &Device, right: &Device| left.address == right.address && left.id == right.id;
    for device in &image.devices {
        if !here.devices.iter().any(|ours| same(ours, device)) {
            let driver = device.driver.as_deref().unwrap_or("no driver");
            found.push(format!("device {} ({}, {driver}) is missing", device.address, device.id));
        }
    }
    for device in &here.devices {
        if !image.devices.iter().any(|theirs| same(theirs, device)) {
            found.push(format!("device {} ({}) is new", device.address, device.id));
        }
    }
}

/// Compares the IOMMUs. The kernel of the image goes on with its own IOMMUs, at the same addresses
/// and with the same features.
fn iommus(theirs: &[Iommu], ours: &[Iommu], found: &mut Vec<String>) {
    for iommu in theirs {
        match ours.iter().find(|here| here.name == iommu.name) {
            None => found.push(format!("IOMMU {} is missing, or not used", iommu.name)),
            Some(here) if here.registers != iommu.registers => found.push(format!(
                "IOMMU {} is another: {}, the image's {}",
                iommu.name,
                here.registers.join(" "),
                iommu.registers.join(" ")
            )),
            Some(_) => {}
        }
    }
    for iommu in ours {
        if !theirs.iter().any(|there| there.name == iommu.name) {
            found.push(format!("IOMMU {} is new, or was not used", iommu.name));
        }
    }
}

/// Computes if waiting frames find room. A frame waits if the restore environment occupies its
/// destination frame. It waits in memory outside of the image, or in the destination frame of a
/// zero page that has come before. The driver (`switch/driver/snapshot/restore.c`) decides in the
/// end.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    limit: u64,
    /// Pages that are set aside, and frames that wait.
    wanted: u64,
    places: u64,
    /// Largest shortage so far.
    missing: u64,
}

impl Room {
    /// Makes the room of an image with these memory ranges, in a restore environment of so many
    /// MiB.
    #[must_use]
    pub fn new(ranges: &[Range], memory_mib: u64) -> Self {
        let limit = memory_mib << 20;
        let end = |range: &Range| range.start_phys.saturating_add(range.pages.saturating_mul(PAGE as u64));
        let above = |range: &Range| end(range).saturating_sub(range.start_phys.max(limit)) / PAGE as u64;
        let free = ranges.iter().filter(|range| range.kind != Kind::Kept).map(above);
        let (wanted, places) = (set_aside(limit, ranges.iter().map(end).max().unwrap_or(0)), free.sum());
        Self { limit, wanted, places, missing: wanted.saturating_sub(places) }
    }

    /// Counts a frame. Frames come in the image's order.
    pub fn add(&mut self, frame: &Frame) {
        match (frame.phys < self.limit, frame.source == Source::Zero) {
            (true, false) => self.wanted += 1,
            (false, true) => self.places += 1,
            _ => {}
        }
        // Frames that come later give no room for frames that wait now.
        self.missing = self.missing.max(self.wanted.saturating_sub(self.places));
    }

    /// Returns the missing room in bytes.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.missing * PAGE as u64
    }

    /// Returns the reason if there is not enough room.
    #[must_use]
    pub fn lacking(&self) -> Option<String> {
        let missing = Some(self.missing()).filter(|missing| *missing > 0)?;
        Some(format!(
            "{} of its memory would find no room in the restore environment (try less --memory, or a \
             larger --pool for the next checkpoint)",
            bytes(missing)
        ))
    }
}

/// Returns the number of pages that the driver sets aside before the first frame comes (`set_aside`
/// there): lists of copies, tables for all memory up to `top_phys`, and the landing itself.
fn set_aside(occupied_bytes: u64, top_phys: u64) -> u64 {
    let lists = 2 * (occupied_bytes / PAGE as u64 / LANDING_LIST_MAX as u64 + 1);
    lists + (top_phys >> 30) + (top_phys >> 39) + 16
}

/// Returns the image's file systems that have changed since the instant.
#[must_use]
pub fn changed_disks(file_systems: &[FileSystem]) -> Vec<String> {
    file_systems.iter().filter_map(changed).collect()
}

/// Returns the image's file systems that are not here.
#[must_use]
pub fn missing_disks(file_systems: &[FileSystem]) -> Vec<String> {
    let missing = |file_system: &FileSystem| {
        let why = disks::is_here(file_system, &Sysroot::default()).err()?;
        let FileSystem { kind, mounted_at, device, .. } = file_system;
        Some(format!("the {kind} file system of {mounted_at} ({device}) is on no disk here: {why}"))
    };
    file_systems.iter().filter_map(missing).collect()
}

fn changed(file_system: &FileSystem) -> Option<String> {
    let name = format!(
        "the {} file system of {} ({})",
        file_system.kind, file_system.mounted_at, file_system.device
    );
    let Some(fingerprint) = &file_system.fingerprint else {
        return Some(format!("{name} has no fingerprint of the instant: it is unknown if it has changed"));
    };
    match disks::fingerprint_now(file_system, &Sysroot::default()) {
        Ok(found) if found == *fingerprint => None,
        Ok(_) => Some(format!("{name} was written to after the instant")),
        Err(why) => Some(format!("{name}: {why}")),
    }
}

/// Waits for disks that are not there yet.
pub fn wait_for_disks(file_systems: &[FileSystem], patience: Duration) {
    let end = Instant::now() + patience;
    let missing = |file_system: &FileSystem| {
        let known = file_system.uuid.is_some() || !file_system.pieces.is_empty();
        known && disks::is_here(file_system, &Sysroot::default()).is_err()
    };
    while file_systems.iter().any(missing) && Instant::now() < end {
        thread::sleep(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_image::{FirmwareRange, Processor};
    use proptest::prelude::*;

    fn machine() -> Machine {
        let ram = FirmwareRange { start_phys: 0, last_phys: 0xFFFF, kind: "System RAM".into() };
        Machine {
            processor: Processor { vendor: "A".into(), flags: vec!["fpu".into()], ..Processor::default() },
            firmware: vec![ram],
            devices: vec![Device { address: "0000:00:01.0".into(), id: "1:2".into(), ..Device::default() }],
            iommus: Some(vec![iommu("dmar0", "a")]),
            ..Machine::default()
        }
    }

    fn iommu(name: &str, register: &str) -> Iommu {
        Iommu { name: name.into(), registers: vec![register.into()] }
    }

    const LIMIT_MIB: u64 = 64;

    fn frame(mib: u64, source: Source) -> Frame {
        Frame { phys: mib << 20, source }
    }

    /// Makes ranges with so many free pages outside of the restore environment, and others inside.
    fn ranges(free: u64) -> Vec<Range> {
        let range = |start_mib: u64, pages, kind| Range { start_phys: start_mib << 20, pages, kind };
        // One MiB of the second is below the limit.
        vec![
            range(0, 512, Kind::Kept),
            range(LIMIT_MIB - 1, 256 + free, Kind::Free),
            range(1 << 20, 512, Kind::Kept),
        ]
    }

    /// Pages that the driver sets aside for these: 2 × (16384 / 255 + 1) pages of lists, tables for
    /// 1 TiB and 2 MiB, and 16.
    const ASIDE: u64 = 130 + 1024 + 2 + 16;

    #[test]
    fn frames_that_wait_need_room() {
        let mut room = Room::new(&ranges(ASIDE + 3), LIMIT_MIB);
        for _ in 0..3 {
            room.add(&frame(1, Source::Data));
            room.add(&frame(2, Source::Zero));
            room.add(&frame(100, Source::Data));
        }
        assert_eq!(room.lacking(), None);
        let mut other = room;
        room.add(&frame(1, Source::Frame(0)));
        assert!(room.lacking().is_some_and(|text| text.starts_with("4.00 KiB")), "{:?}", room.lacking());
        // The destination frame of a zero page is no room before the zero page has come.
        room.add(&frame(64, Source::Zero));
        assert!(room.lacking().is_some_and(|text| text.starts_with("4.00 KiB")), "{:?}", room.lacking());
        other.add(&frame(64, Source::Zero));
        other.add(&frame(1, Source::Frame(0)));
        assert_eq!(other.lacking(), None);
        // Pages that are set aside cannot be in the destination frames of zero pages.
        assert!(Room::new(&ranges(ASIDE - 1), LIMIT_MIB).lacking().is_some());
    }

    /// Places frames one by one as the driver does; returns false if one finds no room.
    fn finds_room(free: u64, frames: &[Frame]) -> bool {
        let Some(unused) = free.checked_sub(ASIDE) else { return false };
        let left = frames.iter().try_fold(unused, |places, frame| {
            match (frame.phys >> 20 < LIMIT_MIB, frame.source) {
                (false, Source::Zero) => Some(places + 1),
                (true, Source::Data | Source::Frame(_)) => places.checked_sub(1),
                _ => Some(places),
            }
        });
        left.is_some()
    }

    fn any_frame() -> impl Strategy<Value = Frame> {
        let source = prop_oneof![Just(Source::Data), Just(Source::Zero), Just(Source::Frame(0))];
        (prop_oneof![0..LIMIT_MIB, LIMIT_MIB..1 << 20], source).prop_map(|(mib, source)| frame(mib, source))
    }

    proptest! {
        /// The computed shortage is exact: with so much more room the driver succeeds, with less it
        /// fails.
        #[test]
        fn room_is_what_the_driver_finds(
            free in ASIDE - 4..ASIDE + 24,
            frames in proptest::collection::vec(any_frame(), 0..64),
        ) {
            let mut room = Room::new(&ranges(free), LIMIT_MIB);
            frames.iter().for_each(|frame| room.add(frame));
            prop_assert_eq!(room.lacking().is_none(), finds_room(free, &frames));
            prop_assert!(finds_room(free + room.missing, &frames));
            prop_assert!(room.missing == 0 || !finds_room(free + room.missing - 1, &frames));
        }
    }

    /// Virtual functions of a card exist only while its driver wants them.
    #[test]
    fn an_environment_has_no_virtual_functions() {
        let root = tempfile::tempdir().expect("a folder");
        let sysroot = Sysroot::at(root.path());
        let whole = machine();
        assert_eq!(in_environment(&whole, &sysroot), whole);
        std::fs::create_dir_all(sysroot.path("sys/bus/pci/devices/0000:00:01.0/physfn")).expect("a folder");
        let found = differences(&whole, &in_environment(&whole, &sysroot));
        assert_eq!(found, ["device 0000:00:01.0 (1:2, no driver) is missing"]);
    }

    #[test]
    fn iommus_are_the_same() {
        let mut other = machine();
        other.iommus = Some(vec![iommu("dmar0", "b"), iommu("dmar1", "a")]);
        let found = differences(&machine(), &other);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("dmar0 is another: b") && found[1].contains("dmar1 is new"), "{found:?}");
        other.iommus = Some(Vec::new());
        let found = differences(&machine(), &other);
        assert!(found.len() == 1 && found[0].contains("dmar0 is missing"), "{found:?}");
        // Images of earlier versions do not describe IOMMUs.
        other.iommus = None;
        assert_eq!(differences(&other, &machine()), Vec::<String>::new());
    }

    /// The driver would refuse the image when the machine is off.
    #[test]
    fn more_cpus_than_a_landing_has_room_for_are_refused() {
        let mut many = machine();
        many.cpus = vec![mercury_image::Cpu::default(); LANDING_CPUS_MAX];
        assert_eq!(differences(&many, &many), Vec::<String>::new());
        many.cpus.push(mercury_image::Cpu::default());
        let found = differences(&many, &many);
        assert_eq!(found, ["the image's machine has 507 CPUs, and a restore brings back 506"]);
    }

    #[test]
    fn every_reason_is_given() {
        assert_eq!(differences(&machine(), &machine()), Vec::<String>::new());
        let mut other = machine();
        other.processor.flags.clear();
        other.processor.microcode = "2".into();
        other.firmware[0].last_phys = 0x1_FFFF;
        other.devices[0].id = "1:3".into();
        let found = differences(&machine(), &other);
        assert_eq!(found.len(), 5, "{found:?}");
        assert!(found[0].contains("lacks fpu"), "{found:?}");
        assert!(found[2].contains("0x1ffff"), "{found:?}");
    }
}
