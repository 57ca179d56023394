//! The image's description of its machine: everything but the content of memory.

use serde::{Deserialize, Serialize};

use crate::{firmware::FirmwareMemory, record::Identity};

/// A machine at the instant of its image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Time of the instant in seconds since 1970, by the machine's own clock.
    pub taken_at: u64,
    /// Host name of the machine.
    pub host: String,
    /// The kernel's release and build, as in `/proc/version`.
    pub kernel: String,
    /// The kernel's release alone, as `uname -r` prints it.
    pub release: String,
    /// The kernel's command line.
    pub command_line: String,
    /// Random identifier that the kernel draws at each boot.
    pub boot_id: String,
    /// Version of Mercury that made the image.
    pub mercury: String,
    /// Properties that all processors share.
    pub processor: Processor,
    /// The processors, one entry each.
    pub cpus: Vec<Cpu>,
    /// Ranges of physical memory: those in the image, and those that it leaves out.
    pub ranges: Vec<Range>,
    /// The memory map of the firmware.
    pub firmware: Vec<FirmwareRange>,
    /// Address and mode in which the machine goes on.
    pub resume: Resume,
    /// Place of the kernel's note for crash-dump tools.
    pub vmcoreinfo: Option<VmCoreInfo>,
    /// PCI devices, in the order of their addresses.
    pub devices: Vec<Device>,
    /// IOMMUs that the machine used, by name. `None`: an earlier Mercury did not record them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iommus: Option<Vec<Iommu>>,
    /// File systems on block devices that were mounted for writing.
    pub file_systems: Vec<FileSystem>,
    /// Swap areas on block devices that were on. They hold nothing of the machine's memory. Empty: there is
    /// none, or an earlier Mercury made the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub swap: Vec<SwapArea>,
    /// Mount points of file systems on other machines (NFS, CIFS, Ceph) that were mounted for writing, in a
    /// checkpoint. Empty: there is none, or an earlier Mercury made the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub served: Vec<String>,
    /// Drivers of a guest's devices that the kernel does not have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing_drivers: Vec<String>,
    /// Memory of the firmware that the kernel may read: ACPI tables and the like. It is needed where
    /// the machine goes on with other firmware, as a guest. Empty: it could not be read, or an
    /// earlier Mercury made the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub firmware_memory: Vec<FirmwareMemory>,
    /// Reason why [`Machine::firmware_memory`] is empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub firmware_unread: String,
    /// Controllers of disks on NVMe, and their disks. Empty: there is none, or an earlier Mercury made
    /// the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nvme: Vec<NvmeController>,
    /// Controllers of disks on AHCI, and their disks. Empty: there is none, or an earlier Mercury made
    /// the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ahci: Vec<AhciController>,
    /// Clocks of the machine. `None`: an earlier Mercury did not record them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timers: Option<Timers>,
    /// True if the machine ends its connections with other machines whenever it comes back, because the
    /// machine that ran on has used them. `None`: an earlier Mercury made the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ends_connections: Option<bool>,
    /// True if the checkpoint let the machine run on. An earlier Mercury did not say so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ran_on: bool,
    /// Images that this one needs, from the full one to its parent. Empty: this image is a full
    /// one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parents: Vec<Identity>,
}

impl Machine {
    /// Returns the number of pages in the image.
    #[must_use]
    pub fn kept_pages(&self) -> u64 {
        let kept = self.ranges.iter().filter(|range| range.kind == Kind::Kept);
        kept.map(|range| range.pages).fold(0, u64::saturating_add)
    }

    /// Returns the places on servers that the machine writes to: mount points, and devices with swap. It
    /// reaches them wherever it goes on.
    #[must_use]
    pub fn on_servers(&self) -> Vec<&str> {
        let disks = self.file_systems.iter().filter(|one| one.goes_along).map(|one| one.mounted_at.as_str());
        let swap = self.swap.iter().filter(|one| one.goes_along).map(|one| one.device.as_str());
        self.served.iter().map(String::as_str).chain(disks).chain(swap).collect()
    }
}

/// Properties that all processors share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Processor {
    /// Vendor: `AuthenticAMD` or `GenuineIntel`.
    pub vendor: String,
    /// Name of the model.
    pub model: String,
    /// Family, model and stepping, in this order.
    pub signature: [u32; 3],
    /// Revision of the microcode.
    pub microcode: String,
    /// Features by the kernel's names, sorted.
    pub flags: Vec<String>,
    /// Components of the extended state that are enabled for programs, from the third on. Empty: there is
    /// none, or an earlier Mercury made the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub xsave: Vec<StateComponent>,
    /// Leaves of CPUID with features that programs find by themselves. Empty: an earlier Mercury made the
    /// image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub leaves: Vec<Leaf>,
}

/// A leaf of CPUID as programs read it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leaf {
    /// EAX of the request.
    pub function: u32,
    /// ECX of the request.
    pub index: u32,
    /// The answer: EAX, EBX, ECX and EDX.
    pub words: [u32; 4],
}

/// A component of the extended state that XSAVE writes, as a subleaf of CPUID Dh describes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateComponent {
    /// The component's bit in XCR0.
    pub number: u32,
    /// Its size.
    pub bytes: u32,
    /// Its place from the area's begin, in the standard format.
    pub offset: u32,
    /// ECX of the subleaf: its place in the compacted format is aligned (bit 1).
    pub flags: u32,
}

/// One processor of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// Linux's number of the CPU.
    pub cpu: u32,
    /// Identifier of its local APIC.
    pub apic_id: u32,
    /// Physical address of its saved state (`SavedCpu` of mercury-abi).
    pub saved_phys: u64,
}

/// The treatment of a range of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The image holds the content.
    Kept,
    /// The image leaves the content out: it does not matter.
    Free,
}

/// A range of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// Physical address of the first byte, page-aligned.
    pub start_phys: u64,
    /// Length in pages of 4 KiB.
    pub pages: u64,
    /// Treatment of the range.
    pub kind: Kind,
}

/// An entry of the firmware's memory map.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FirmwareRange {
    /// Physical address of the first byte.
    pub start_phys: u64,
    /// Physical address of the last byte, inclusive.
    pub last_phys: u64,
    /// Type of the range, as in `/sys/firmware/memmap`.
    pub kind: String,
}

/// Address and mode in which a machine goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resume {
    /// Kernel virtual address of the first instruction.
    pub virt: u64,
    /// Physical addresses of the page that holds the instruction, and of the next page.
    pub phys: [u64; 2],
    /// True if the kernel uses five-level paging.
    pub five_level: bool,
    /// True if the local APICs are in x2APIC mode.
    pub x2apic: bool,
}

/// Place of the kernel's note for crash-dump tools, from `/sys/kernel/vmcoreinfo`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmCoreInfo {
    /// Physical address of the ELF note.
    pub phys: u64,
    /// Length of the note in bytes.
    pub bytes: u64,
}

/// A PCI device of the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Domain, bus, device and function, as `lspci -D` prints them.
    pub address: String,
    /// Vendor and device identifiers, as in `lspci -n`.
    pub id: String,
    /// Class code, as in `/sys`.
    pub class: String,
    /// Driver that was bound to the device.
    pub driver: Option<String>,
    /// Ranges of addresses that the device decodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bars: Vec<Bar>,
    /// First bytes of the configuration space: 64, or 256 of a bridge.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "crate::hexadecimal")]
    pub config: Vec<u8>,
}

/// A range of addresses that a PCI device decodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bar {
    /// Number of the line in the device's file `resource` in `/sys`: 0 to 5 are base address
    /// registers, 6 is the expansion ROM, a bridge's windows follow.
    pub number: u32,
    /// First address: physical, or a port.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
    /// The kernel's flags of the resource (`include/linux/ioport.h`).
    pub flags: u64,
}

/// Clocks of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timers {
    /// Frequency of the time-stamp counter in kHz, as the kernel uses it.
    pub tsc_khz: u64,
    /// Name of the clock source that the kernel uses.
    pub clocksource: String,
    /// Value of the time-stamp counter right after the instant. 0: an earlier Mercury did not record it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub tsc: u64,
    /// Rate in Hz at which the timers of the local APICs count, before their dividers. 0: unknown, or the
    /// kernel does not use that rate.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub apic_hz: u64,
    /// Rate of the HPET in Hz. 0: the kernel has none, or does not say.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hpet_hz: u64,
    /// Milliseconds by which the RTC is ahead of the machine's time; below zero if it is behind. The kernel
    /// finds out by the RTC how long it has stood still.
    #[serde(default, skip_serializing_if = "is_none")]
    pub rtc_ahead_ms: i64,
    /// The machine's time when it sends this description to a destination, in milliseconds since 1970. 0: it
    /// is written to an image, or an earlier Mercury did not record the time.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub real_ms: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_none(number: &i64) -> bool {
    *number == 0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// An IOMMU. Its tables are in memory; the kernel sets its registers anew.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Iommu {
    /// The kernel's name of the IOMMU.
    pub name: String,
    /// Address of its registers and its capabilities, as far as the kernel shows them.
    pub registers: Vec<String>,
}

/// A file system that was mounted for writing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSystem {
    /// Mount point of the file system.
    pub mounted_at: String,
    /// Type of the file system.
    pub kind: String,
    /// Block device of the file system.
    pub device: String,
    /// UUID of the file system, if it has one.
    pub uuid: Option<String>,
    /// True if the file system was frozen at the instant: its blocks hold all earlier writes.
    pub frozen: bool,
    /// Fingerprint at the instant: BLAKE3 of the blocks that change with every write to the file
    /// system.
    #[serde(alias = "mark")]
    pub fingerprint: Option<String>,
    /// Places of those blocks on disks, if the device is made of others. The fingerprint covers
    /// these places.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pieces: Vec<Piece>,
    /// Place of the device on a disk, unless the device is made of others. `None`: it is, or an earlier
    /// Mercury made the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<DiskPart>,
    /// True if the device is on a server, by a connection that only the kernel holds: the machine keeps it
    /// wherever it goes on with its addresses.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub goes_along: bool,
}

/// A swap area on a block device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwapArea {
    /// Block device of the area.
    pub device: String,
    /// The kernel's names of the disks that hold it. Empty: unknown.
    pub disks: Vec<String>,
    /// True if the device is on a server, by a connection that only the kernel holds.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub goes_along: bool,
}

/// The place of a partition, or of a whole disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskPart {
    /// The kernel's name of the disk.
    pub disk: String,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// A range of bytes on a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Name of the disk, from the content that is written on it.
    pub disk: String,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length of the range in bytes.
    pub length: u64,
    /// Place of the disk, if it is a partition or a whole disk. `None`: an earlier Mercury made the
    /// image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<DiskPart>,
}

/// A controller of disks on NVMe. A monitor shows it to the machine again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvmeController {
    /// Address of its PCI device ([`Device::address`]).
    pub address: String,
    /// The kernel's name of the controller.
    pub name: String,
    /// Answer of the controller to Identify Controller, without the zeros at its end.
    #[serde(with = "crate::hexadecimal")]
    pub identify: Vec<u8>,
    /// Largest number of entries of a queue. Zero: unknown.
    pub queue_entries: u32,
    /// True if it raises interrupts by messages (MSI, MSI-X).
    pub has_messages: bool,
    /// True if queues may lie in memory of its own (CMB).
    pub has_memory: bool,
    /// Its disks.
    pub disks: Vec<NvmeDisk>,
}

/// A disk on NVMe: a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvmeDisk {
    /// The kernel's name of the disk, such as `nvme0n1`.
    pub name: String,
    /// Number of the namespace.
    pub namespace: u32,
    /// Answer of the controller to Identify Namespace, without the zeros at its end.
    #[serde(with = "crate::hexadecimal")]
    pub identify: Vec<u8>,
    /// Identifiers of the namespace, as the controller lists them, without the zeros at their end.
    #[serde(with = "crate::hexadecimal")]
    pub identifiers: Vec<u8>,
}

/// A controller of disks on AHCI. A monitor shows it to the machine again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AhciController {
    /// Address of its PCI device ([`Device::address`]).
    pub address: String,
    /// Its register of capabilities, as the driver uses it.
    pub capabilities: u32,
    /// Its register of more capabilities (CAP2).
    pub more_capabilities: u32,
    /// Its register of the version.
    pub version: u32,
    /// True if it raises interrupts by messages (MSI, MSI-X).
    pub has_messages: bool,
    /// Global system interrupt of its line, if it does without messages. `None`: unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
    /// Its ports, in the order of their numbers.
    pub ports: Vec<AhciPort>,
}

/// A port of a controller on AHCI.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AhciPort {
    /// Its number, from 0.
    pub number: u32,
    /// Its register of commands.
    pub command: u32,
    /// True if a port multiplier is connected.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_multiplier: bool,
    /// Its disk. `None`: it has none that a monitor could show.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<AhciDisk>,
}

/// A disk on AHCI.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AhciDisk {
    /// The kernel's name of the disk, such as `sda`.
    pub name: String,
    /// Answer of the disk to IDENTIFY DEVICE.
    #[serde(with = "crate::hexadecimal")]
    pub identify: Vec<u8>,
}
