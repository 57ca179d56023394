//! Reasons for which this host cannot run the machine as a guest. All are found before memory is touched.

use crate::{
    acpi::Tables,
    entry, features,
    layout::Layout,
    time::{self, Clock},
};
use kvm_bindings::kvm_cpuid_entry2;
use mercury_abi::{code::Code, restart::SavedCpu};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_image::{Machine, StateComponent};
use std::{
    collections::BTreeSet,
    fmt::{self, Display},
};

/// Address at which KVM has its IOAPIC.
const IOAPIC: u64 = 0xFEC0_0000;
/// Largest number of a local APIC that fits into interrupts without remapping.
const APIC_ID_MAX: u32 = 254;
/// Vendor identifier of virtio's PCI devices.
const VIRTIO: &str = "1af4:";

/// A reason for which no host can run the machine of an image as a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit(pub String);

/// Returns the error of a machine that no host can run as a guest.
pub(crate) fn unfit(why: impl Into<String>) -> Unfit {
    Unfit(why.into())
}

impl Display for Unfit {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.0)
    }
}

impl From<Unfit> for Error {
    fn from(unfit: Unfit) -> Self {
        Self::new(Exit::Impossible, format!("the machine of the image cannot be a guest: {unfit}")).hint(
            "check the image with `mercury inspect`, or restore it on its own hardware (`mercury restore`)",
        )
    }
}

/// Returns the error of a step that KVM refuses.
pub(crate) fn kvm_refused(what: &str, error: impl Display) -> Error {
    Error::new(Exit::Impossible, format!("KVM does not {what}: {error}")).hint(
        "the host's kernel log (`dmesg`) may have the reason; choose a host with a newer kernel \
         or another processor",
    )
}

/// A reason against a machine as a guest of this host, with its code for `mercury explain`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    code: Code,
    text: String,
}

impl Reason {
    pub(crate) fn new(code: Code, text: impl Display) -> Self {
        Self { code, text: text.to_string() }
    }
}

impl Display for Reason {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{} [{}]", self.text, self.code.name())
    }
}

/// Memory that a guest may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLimit {
    /// As much as the host has available.
    Available,
    /// The same, for `mercury receive --beside` without `--memory-limit`, but not the memory that other
    /// guests have and do not use yet.
    AvailableToArrivals {
        /// Memory of other guests that they do not use yet, in bytes.
        promised: u64,
    },
    /// What `--memory-limit` says in MiB, whatever the host has available.
    Given(u64),
}

impl MemoryLimit {
    /// Returns the reason against a machine with so much memory, on a host that has so much available.
    fn obstacle(self, needed: u64, available: u64) -> Option<String> {
        // A limit of the text's number must be enough.
        let mib = needed.div_ceil(1 << 20);
        let has = format!("it has {mib} MiB of memory");
        let left = available >> 20;
        match self {
            Self::Available if needed > available => Some(format!("{has}, and {left} MiB are available")),
            Self::AvailableToArrivals { promised } if needed > available.saturating_sub(promised) => {
                let others = match promised >> 20 {
                    0 => String::new(),
                    others => format!(", of which other guests may still take {others} MiB"),
                };
                Some(format!(
                    "{has}, and {left} MiB are available{others}; `receive --memory-limit {mib}M` takes it \
                     all the same"
                ))
            }
            Self::Given(limit) if mib > limit => {
                Some(format!("{has}, and --memory-limit allows {limit} MiB"))
            }
            _ => None,
        }
    }
}

/// Processors that a guest may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpuLimit {
    /// As many as this process may use of the host's.
    #[default]
    OfHost,
    /// As many as KVM allows: `--overcommit-cpus`.
    OfKvm,
}

impl CpuLimit {
    /// Returns the limit for the answer to `--overcommit-cpus`.
    #[must_use]
    pub fn of(overcommits: bool) -> Self {
        if overcommits { Self::OfKvm } else { Self::OfHost }
    }
}

/// Disks and file systems on servers, which two lives of one machine would both write to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServerDisks {
    /// Of one life alone.
    #[default]
    Guarded,
    /// Also of a life beside another one: `--force-server-disks`.
    Forced,
}

impl ServerDisks {
    /// Returns the rule for the answer to `--force-server-disks`.
    #[must_use]
    pub fn of(is_forced: bool) -> Self {
        if is_forced { Self::Forced } else { Self::Guarded }
    }

    /// Returns the reason against a machine that ran on after its checkpoint, and writes to servers.
    fn obstacle(self, machine: &Machine) -> Option<String> {
        let places = machine.on_servers();
        (self == Self::Guarded && machine.ran_on && !places.is_empty()).then(|| {
            format!(
                "its machine ran on after the checkpoint, and has written to what it has on servers ({}): \
                 with the old state in memory the guest would destroy that (`--force-server-disks` starts it \
                 all the same)",
                places.join(", ")
            )
        })
    }
}

/// What the operator lets a guest have of the host, and of servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub memory: MemoryLimit,
    pub cpus: CpuLimit,
    pub servers: ServerDisks,
}

/// Facts about the host.
#[derive(Debug)]
pub struct Host<'a> {
    /// CPUID that KVM offers to a guest.
    pub cpuid: &'a [kvm_cpuid_entry2],
    /// Largest number of processors of a guest.
    pub cpus_max: usize,
    /// Processors that this process may use.
    pub cpus_usable: usize,
    /// Memory that is available, in bytes.
    pub available: u64,
    /// What the guest may have of these.
    pub limits: Limits,
    /// Drivers of the devices that the guest will find.
    pub drivers: &'a [&'static str],
    /// Its time-stamp counter.
    pub clock: Clock,
}

/// Returns every reason for which the machine cannot go on here as a guest.
#[must_use]
pub fn reasons(
    machine: &Machine,
    layout: &Result<Layout, Unfit>,
    tables: &Result<Tables, Unfit>,
    host: &Host<'_>,
) -> Vec<Reason> {
    let mut found = Vec::new();
    processor(machine, host, &mut found);
    processors(machine, host, &mut found);
    match layout {
        Ok(layout) => addresses(machine, layout, &mut found),
        Err(unfit) => found.push(Reason::new(Code::GuestDescription, unfit)),
    }
    devices(machine, &mut found);
    drivers(machine, host.drivers, &mut found);
    if let Some(timers) = &machine.timers {
        let all =
            [time::obstacle(timers), host.clock.obstacle(timers, machine.cpus.len())].into_iter().flatten();
        found.extend(all.map(|why| Reason::new(Code::GuestTimers, why)));
    }
    match tables {
        Ok(tables) if tables.ioapic_phys.is_some_and(|phys| phys != IOAPIC) => {
            found.push(Reason::new(
                Code::GuestFirmware,
                "its first IOAPIC is not at 0xfec00000, where KVM has it",
            ));
        }
        Ok(_) => {}
        Err(unfit) => found.push(Reason::new(Code::GuestFirmware, unfit)),
    }
    // Its kernel may use all that the guest gets at any time, also memory that no range of the image names.
    let needed = layout.as_ref().map_or_else(|_| named_bytes(machine), Layout::bytes);
    let obstacle = host.limits.memory.obstacle(needed, host.available);
    found.extend(obstacle.map(|why| Reason::new(Code::GuestMemory, why)));
    let obstacle = host.limits.servers.obstacle(machine);
    found.extend(obstacle.map(|why| Reason::new(Code::GuestDisks, why)));
    if !machine.parents.is_empty() {
        let text = "its image is incremental: merge it with its parents first (`mercury merge`)";
        found.push(Reason::new(Code::GuestIncremental, text));
    }
    found
}

/// Returns the size of the memory that the image names.
fn named_bytes(machine: &Machine) -> u64 {
    let pages = machine.ranges.iter().map(|range| range.pages).fold(0, u64::saturating_add);
    pages.saturating_mul(mercury_image::PAGE as u64)
}

/// Refuses a machine that cannot be a guest, with all reasons.
///
/// # Errors
/// There is a reason.
pub fn refuse(reasons: &[Reason]) -> Result<()> {
    let Some(first) = reasons.first() else { return Ok(()) };
    let all: Vec<String> = reasons.iter().map(Reason::to_string).collect();
    let text = format!("the machine cannot be a guest here:\n  {}", all.join("\n  "));
    let refused = Error { code: Some(first.code), ..Error::new(Exit::Impossible, text) };
    Err(refused.hint(
        "`mercury explain CODE` says more of each; restore the machine on its own hardware (`mercury \
         restore`), or choose another host; nothing was changed",
    ))
}

fn processor(machine: &Machine, host: &Host<'_>, found: &mut Vec<Reason>) {
    let theirs = &machine.processor;
    let Some((vendor, family)) = identity(host.cpuid) else {
        found.push(Reason::new(Code::GuestProcessor, "KVM does not say which processor it offers"));
        return;
    };
    if (vendor.as_str(), family) != (theirs.vendor.as_str(), theirs.signature[0]) {
        let text = format!(
            "its processor is {} (family {}), and this host's is {vendor} (family {family})",
            theirs.vendor, theirs.signature[0]
        );
        found.push(Reason::new(Code::GuestProcessor, text));
        return;
    }
    let missing = features::missing(theirs, host.cpuid);
    if !missing.is_empty() {
        let text = format!("its kernel uses features that KVM does not offer here: {}", missing.join(" "));
        found.push(Reason::new(Code::GuestFeatures, text));
    }
    state(machine, host.cpuid, found);
    let has_levels =
        host.cpuid.iter().any(|one| one.function == 7 && one.index == 0 && one.ecx & 1 << 16 != 0);
    if machine.resume.five_level && !has_levels {
        let text = "its kernel uses five levels of page tables, which KVM does not offer here";
        found.push(Reason::new(Code::GuestFeatures, text));
    }
}

/// Finds components of the extended state that the processor here lacks or keeps elsewhere. A kernel has
/// read their places at its start, and the processor alone decides on them.
fn state(machine: &Machine, cpuid: &[kvm_cpuid_entry2], found: &mut Vec<Reason>) {
    const LEAF: u32 = 0xD;
    let is_other = |one: &&StateComponent| {
        let ours = cpuid.iter().find(|entry| entry.function == LEAF && entry.index == one.number);
        ours.is_none_or(|ours| (ours.eax, ours.ebx, ours.ecx & 3) != (one.bytes, one.offset, one.flags & 3))
    };
    let others = machine.processor.xsave.iter().filter(is_other);
    let others: Vec<String> = others.map(|one| one.number.to_string()).collect();
    if !others.is_empty() {
        let text = format!(
            "its kernel saves the registers of programs in another layout than this host's processor: \
             component {} of XSAVE",
            others.join(", ")
        );
        found.push(Reason::new(Code::GuestFeatures, text));
    }
}

/// Returns the vendor and the family.
fn identity(cpuid: &[kvm_cpuid_entry2]) -> Option<(String, u32)> {
    let leaf = |number| cpuid.iter().find(|entry| entry.function == number);
    let (first, second) = (leaf(0)?, leaf(1)?);
    let text: Vec<u8> =
        [first.ebx, first.edx, first.ecx].iter().flat_map(|word| word.to_le_bytes()).collect();
    let family = second.eax >> 8 & 0xF;
    let family = if family == 0xF { family + (second.eax >> 20 & 0xFF) } else { family };
    Some((String::from_utf8_lossy(&text).into_owned(), family))
}

fn processors(machine: &Machine, host: &Host<'_>, found: &mut Vec<Reason>) {
    let cpus = &machine.cpus;
    if cpus.is_empty() {
        found.push(Reason::new(Code::GuestDescription, "its image names no processor"));
    }
    if cpus.len() > host.cpus_max {
        let text = format!("it has {} processors, and KVM allows {}", cpus.len(), host.cpus_max);
        found.push(Reason::new(Code::GuestCpus, text));
    } else if cpus.len() > host.cpus_usable && host.limits.cpus == CpuLimit::OfHost {
        let text = format!(
            "it has {} processors, and this host gives {}: its kernel would wait for processors that do not \
             run, and could not move away (`--overcommit-cpus` takes it all the same)",
            cpus.len(),
            host.cpus_usable
        );
        found.push(Reason::new(Code::GuestCpus, text));
    }
    for cpu in cpus {
        if cpu.apic_id > APIC_ID_MAX {
            let text = format!("CPU {} has APIC {}, and {APIC_ID_MAX} is the largest", cpu.cpu, cpu.apic_id);
            found.push(Reason::new(Code::GuestCpus, text));
        }
    }
    let different: BTreeSet<u32> = cpus.iter().map(|cpu| cpu.apic_id).collect();
    if different.len() != cpus.len() {
        found.push(Reason::new(Code::GuestDescription, "its image names two processors with one APIC"));
    }
}

/// Finds addresses in the description that are not in the machine's memory.
fn addresses(machine: &Machine, layout: &Layout, found: &mut Vec<Reason>) {
    for cpu in &machine.cpus {
        let is_aligned = cpu.saved_phys.is_multiple_of(8);
        if !is_aligned || !layout.contains(cpu.saved_phys, size_of::<SavedCpu>() as u64) {
            let text = format!("the registers of CPU {} are not in its memory", cpu.cpu);
            found.push(Reason::new(Code::GuestDescription, text));
        }
    }
    let unfit = entry::check(machine, layout).err();
    found.extend(unfit.map(|unfit| Reason::new(Code::GuestDescription, unfit)));
}

fn devices(machine: &Machine, found: &mut Vec<Reason>) {
    let virtio: Vec<&str> = machine
        .devices
        .iter()
        .filter(|one| one.id.starts_with(VIRTIO))
        .map(|one| one.address.as_str())
        .collect();
    if !virtio.is_empty() {
        let text = format!(
            "it has virtio devices on PCI ({}), whose drivers would wait for ever, because the devices \
             do not come along",
            virtio.join(", ")
        );
        found.push(Reason::new(Code::GuestDevices, text));
    }
    for device in &machine.devices {
        if let Some(driver @ ("vfio-pci" | "pci-stub")) = device.driver.as_deref() {
            let text = format!("its device {} is given to a guest of its own ({driver})", device.address);
            found.push(Reason::new(Code::GuestDevices, text));
        }
    }
    for iommu in machine.iommus.iter().flatten() {
        let text =
            format!("it uses the IOMMU {}, which guests do not have yet: boot it with iommu=off", iommu.name);
        found.push(Reason::new(Code::GuestIommu, text));
    }
}

fn drivers(machine: &Machine, needed: &[&str], found: &mut Vec<Reason>) {
    let is_missing = |name: &&&str| machine.missing_drivers.iter().any(|missing| missing == **name);
    let missing: Vec<&str> = needed.iter().filter(is_missing).copied().collect();
    if !missing.is_empty() {
        let text = format!(
            "its kernel has no driver for devices that the guest would find: {} could not be loaded there",
            missing.join(", ")
        );
        found.push(Reason::new(Code::GuestDrivers, text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_image::{
        Cpu, Device, FileSystem, FirmwareRange, Iommu, Kind, Processor, Range, Resume, SwapArea, Timers,
    };

    const AVX: StateComponent = StateComponent { number: 2, bytes: 256, offset: 576, flags: 0 };
    const PKRU: StateComponent = StateComponent { number: 9, bytes: 8, offset: 832, flags: 0 };

    /// Returns what KVM offers on AMD's family 23.
    fn cpuid() -> Vec<kvm_cpuid_entry2> {
        let word = |text: &[u8; 4]| u32::from_le_bytes(*text);
        let vendor = kvm_cpuid_entry2 {
            ebx: word(b"Auth"),
            edx: word(b"enti"),
            ecx: word(b"cAMD"),
            ..kvm_cpuid_entry2::default()
        };
        let features =
            kvm_cpuid_entry2 { function: 1, eax: 0x0080_0F12, edx: 1 << 26, ..kvm_cpuid_entry2::default() };
        let avx = kvm_cpuid_entry2 { function: 0xD, index: 2, eax: 256, ebx: 576, ..Default::default() };
        vec![vendor, features, avx]
    }

    fn machine() -> Machine {
        Machine {
            processor: Processor {
                vendor: "AuthenticAMD".into(),
                signature: [23, 1, 2],
                flags: vec!["sse2".into()],
                xsave: vec![AVX],
                ..Processor::default()
            },
            cpus: vec![Cpu { cpu: 0, apic_id: 0, saved_phys: 0x10_0000 }],
            ranges: vec![Range { start_phys: 0x10_0000, pages: 256, kind: Kind::Kept }],
            resume: Resume { virt: 0xFFFF_FFFF_C012_3F80, phys: [0x10_1000, 0x10_2000], ..Resume::default() },
            iommus: Some(Vec::new()),
            ..Machine::default()
        }
    }

    fn found(change: impl FnOnce(&mut Machine)) -> Vec<Reason> {
        found_with(change, Ok(tables()))
    }

    fn tables() -> Tables {
        Tables { ioapic_phys: Some(IOAPIC), ..Tables::default() }
    }

    fn found_with(change: impl FnOnce(&mut Machine), tables: Result<Tables, Unfit>) -> Vec<Reason> {
        found_within(change, tables, CpuLimit::OfHost)
    }

    fn found_within(
        change: impl FnOnce(&mut Machine),
        tables: Result<Tables, Unfit>,
        cpus: CpuLimit,
    ) -> Vec<Reason> {
        let mut machine = machine();
        change(&mut machine);
        let layout = Layout::of(&machine);
        let cpuid = cpuid();
        let drivers = &["virtio_mmio", "virtio_net"];
        let clock = Clock { khz: 3_000_000, scales: false, is_stable: true };
        let limits = Limits { memory: MemoryLimit::Available, cpus, servers: ServerDisks::Guarded };
        let (cpus_max, cpus_usable, available) = (8, 2, 2 << 20);
        let host = Host { cpuid: &cpuid, cpus_max, cpus_usable, available, limits, drivers, clock };
        reasons(&machine, &layout, &tables, &host)
    }

    /// A kernel that was booted on its own processors spins for those that the host does not run.
    #[test]
    fn a_machine_with_more_processors_than_the_host_is_for_those_who_ask_for_it() {
        let with = |count, limit| {
            let change = |one: &mut Machine| {
                let cpu = |number| Cpu { cpu: number, apic_id: number, saved_phys: 0x10_0000 };
                one.cpus = (0..count).map(cpu).collect();
            };
            found_within(change, Ok(tables()), limit)
        };
        assert_eq!(with(2, CpuLimit::OfHost), []);
        let refused = with(3, CpuLimit::OfHost);
        assert!(refused[0].text.contains("3 processors, and this host gives 2"), "{refused:?}");
        assert!(refused[0].text.contains("--overcommit-cpus") && refused[0].code == Code::GuestCpus);
        assert_eq!(with(8, CpuLimit::OfKvm), []);
        assert!(with(9, CpuLimit::OfKvm)[0].text.contains("KVM allows 8"));
    }

    #[test]
    fn a_machine_that_fits_has_no_reason_against_it() {
        assert_eq!(found(|_| ()), []);
        assert!(refuse(&[]).is_ok());
    }

    /// Names faults of the description beside all other reasons, not one at a time.
    #[test]
    fn faults_of_the_description_are_named_with_the_others() {
        let all = found_with(
            |one| {
                one.ranges[0].start_phys = 0x800;
                one.devices = vec![Device { id: "1af4:1041".into(), ..Device::default() }];
            },
            Err(unfit("its firmware has no fixed hardware")),
        );
        let text = refuse(&all).expect_err("refused").message;
        for reason in ["it has memory from 0x800", "no fixed hardware", "virtio devices on PCI"] {
            assert!(text.contains(reason), "{reason}: {text}");
        }
        let other = Tables { ioapic_phys: Some(0xFEC1_0000), ..Tables::default() };
        assert_eq!(found_with(|_| (), Ok(other)).len(), 1);
        assert_eq!(Error::from(unfit("one")).exit, Exit::Impossible);
    }

    #[test]
    fn a_memory_limit_counts_in_place_of_what_is_available() {
        const GIB: u64 = 1 << 30;
        let refused = |limit: MemoryLimit, needed| limit.obstacle(needed, GIB);
        let arrivals = |promised| MemoryLimit::AvailableToArrivals { promised };
        for limit in [MemoryLimit::Available, arrivals(0)] {
            assert_eq!(refused(limit, GIB), None);
        }
        assert!(!refused(MemoryLimit::Available, 2 * GIB).expect("refused").contains("--memory-limit"));
        let text = refused(arrivals(0), 2 * GIB - 4096).expect("refused");
        assert!(text.contains("1024 MiB are available; `receive --memory-limit 2048M`"), "{text}");
        let text = refused(arrivals(GIB / 4), GIB).expect("refused");
        assert!(text.contains("available, of which other guests may still take 256 MiB;"), "{text}");
        assert_eq!(refused(arrivals(GIB / 4), GIB / 4 * 3), None);
        assert!(refused(arrivals(u64::MAX), 4096).is_some());
        assert_eq!(refused(MemoryLimit::Given(2048), 2 * GIB - 4096), None, "as the text says");
        let text = refused(MemoryLimit::Given(512), GIB).expect("refused");
        assert_eq!(text, "it has 1024 MiB of memory, and --memory-limit allows 512 MiB");
    }

    /// The machine that ran on has written to its server, of which the guest's memory knows nothing.
    #[test]
    fn a_second_life_gets_no_disk_on_a_server() {
        type Change = fn(&mut Machine);
        let changes: [(Change, &str); 3] = [
            (|one| one.served = vec!["/".into()], "(/)"),
            (|one| one.file_systems = vec![on_server("/data")], "(/data)"),
            (
                |one| {
                    one.swap =
                        vec![SwapArea { device: "/dev/nbd0".into(), goes_along: true, ..SwapArea::default() }]
                },
                "(/dev/nbd0)",
            ),
        ];
        for (change, place) in changes {
            assert_eq!(found(change), [], "a machine that was off");
            let ran_on = |one: &mut Machine| {
                change(one);
                one.ran_on = true;
            };
            let reasons = found(ran_on);
            assert!(reasons[0].text.contains(place) && reasons[0].code == Code::GuestDisks, "{reasons:?}");
            let mut machine = machine();
            ran_on(&mut machine);
            assert_eq!(ServerDisks::Forced.obstacle(&machine), None);
        }
        assert_eq!(found(|one| one.ran_on = true), []);
    }

    fn on_server(at: &str) -> FileSystem {
        FileSystem { mounted_at: at.into(), goes_along: true, ..FileSystem::default() }
    }

    /// The guest gets all memory that the firmware names, and its kernel may use it. A source that names
    /// little in its ranges would otherwise get more than a limit allows.
    #[test]
    fn memory_that_only_the_firmware_names_counts() {
        let all = found(|one| {
            let ram = (4_u64 << 30, (12_u64 << 30) - 1);
            one.firmware.push(FirmwareRange {
                start_phys: ram.0,
                last_phys: ram.1,
                kind: "System RAM".into(),
            });
        });
        let text = refuse(&all).expect_err("refused").message;
        assert!(text.contains("it has 8194 MiB of memory, and 2 MiB are available"), "{text}");
    }

    #[test]
    fn each_obstacle_is_named() {
        let device = |id: &str, driver: &str| Device {
            address: "0000:00:05.0".into(),
            id: id.into(),
            driver: Some(driver.into()),
            ..Device::default()
        };
        type Change = Box<dyn FnOnce(&mut Machine)>;
        let changes: [(Change, &str); 22] = [
            (Box::new(|one| one.processor.vendor = "GenuineIntel".into()), "GenuineIntel (family 23)"),
            (Box::new(|one| one.processor.signature[0] = 25), "this host's is AuthenticAMD (family 23)"),
            (Box::new(|one| one.processor.flags.push("avx2".into())), "does not offer here: avx2"),
            (Box::new(|one| one.processor.xsave = vec![AVX, PKRU]), "component 9 of XSAVE"),
            (Box::new(|one| one.processor.xsave[0].offset = 832), "component 2 of XSAVE"),
            (Box::new(|one| one.processor.xsave[0].flags = 2), "component 2 of XSAVE"),
            (Box::new(|one| one.resume = Resume { five_level: true, ..one.resume }), "five levels"),
            (Box::new(|one| one.cpus.clear()), "names no processor"),
            (Box::new(|one| one.cpus = vec![one.cpus[0]; 9]), "KVM allows 8"),
            (Box::new(|one| one.cpus = vec![one.cpus[0]; 2]), "two processors with one APIC"),
            (Box::new(|one| one.cpus[0].apic_id = 255), "APIC 255"),
            (Box::new(|one| one.cpus[0].saved_phys = 0x1F_FFF8), "registers of CPU 0"),
            (Box::new(|one| one.resume.virt = 0x1000), "no address of a kernel"),
            (Box::new(|one| one.resume.phys[1] = 0x5000_0000), "resume code is not in its memory"),
            (Box::new(move |one| one.devices = vec![device("1af4:1041", "virtio-pci")]), "(0000:00:05.0)"),
            (Box::new(move |one| one.devices = vec![device("10de:1234", "vfio-pci")]), "vfio-pci"),
            (
                Box::new(|one| one.iommus = Some(vec![Iommu { name: "ivhd0".into(), ..Iommu::default() }])),
                "ivhd0",
            ),
            (Box::new(|one| one.ranges[0].pages = 481), "it has 3 MiB of memory, and 2 MiB are available"),
            (
                Box::new(|one| {
                    one.ranges.push(Range { start_phys: 0x1000_0000, pages: 1 << 20, kind: Kind::Free });
                }),
                "it has 4097 MiB of memory",
            ),
            (
                Box::new(|one| one.missing_drivers = vec!["virtio_net".into(), "virtio_blk".into()]),
                "would find: virtio_net could not",
            ),
            (
                Box::new(|one| one.timers = Some(Timers { apic_hz: 2_000_000_000, ..Timers::default() })),
                "would be late",
            ),
            (
                Box::new(|one| one.timers = Some(Timers { tsc_khz: 2_000_000, ..Timers::default() })),
                "runs at 2000000 kHz",
            ),
        ];
        for (change, expected) in changes {
            let reasons = found(change);
            let refused = refuse(&reasons).expect_err("refused");
            assert!(refused.message.contains(expected), "{expected}: {}", refused.message);
            assert_eq!(refused.exit, Exit::Impossible);
            let code = refused.code.expect("a code");
            assert_eq!(Exit::of(code), Exit::Impossible);
            assert!(refused.message.contains(&format!("[{}]", code.name())), "{}", refused.message);
        }
    }
}
