//! What an image says of its machine, besides the content of memory.

use serde::{Deserialize, Serialize};

use crate::record::Identity;

/// A machine as it was at the instant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Seconds since 1970, by the machine's own clock.
    pub taken_at: u64,
    /// Its name.
    pub host: String,
    /// The kernel's release and build, as in `/proc/version`.
    pub kernel: String,
    /// The kernel's release alone.
    pub release: String,
    /// The kernel's command line.
    pub command_line: String,
    /// Random, different at each boot.
    pub boot_id: String,
    /// Version of Mercury that made the image.
    pub mercury: String,
    /// What the processors are.
    pub processor: Processor,
    /// The processors.
    pub cpus: Vec<Cpu>,
    /// Physical memory: what the image holds, and what it can do without.
    pub ranges: Vec<Range>,
    /// The memory map that the firmware gave.
    pub firmware: Vec<FirmwareRange>,
    /// Where the machine goes on.
    pub resume: Resume,
    /// Where the kernel keeps what tools for crash dumps want to know.
    pub vmcoreinfo: Option<VmCoreInfo>,
    /// PCI devices, in the order of their addresses.
    pub devices: Vec<Device>,
    /// IOMMUs that it used, by name. None: an earlier Mercury did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iommus: Option<Vec<Iommu>>,
    /// File systems on block devices that were mounted for writing.
    pub file_systems: Vec<FileSystem>,
    /// Images that this one cannot do without, first the one that needs none, last its parent. None: it is a full one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parents: Vec<Identity>,
}

impl Machine {
    /// How many pages the image holds.
    #[must_use]
    pub fn kept_pages(&self) -> u64 {
        let kept = self.ranges.iter().filter(|range| range.kind == Kind::Kept);
        kept.map(|range| range.pages).fold(0, u64::saturating_add)
    }
}

/// What all processors have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Processor {
    /// `AuthenticAMD`, `GenuineIntel`.
    pub vendor: String,
    /// The name.
    pub model: String,
    /// Family, model and stepping.
    pub signature: [u32; 3],
    /// Revision of the microcode.
    pub microcode: String,
    /// The kernel's names of its features, sorted.
    pub flags: Vec<String>,
}

/// One processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// Linux's number.
    pub cpu: u32,
    /// Its local APIC's ID.
    pub apic_id: u32,
    /// Physical address of its saved state.
    pub saved_phys: u64,
}

/// What an image has to do with a range of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The image holds it.
    Kept,
    /// It does not matter what is in it.
    Free,
}

/// A range of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// Its start.
    pub start_phys: u64,
    /// Its length in pages.
    pub pages: u64,
    /// What of it.
    pub kind: Kind,
}

/// An entry of the firmware's memory map.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FirmwareRange {
    /// Its start.
    pub start_phys: u64,
    /// Its last byte.
    pub last_phys: u64,
    /// As in `/sys/firmware/memmap`.
    pub kind: String,
}

/// Where a machine goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resume {
    /// Kernel address.
    pub virt: u64,
    /// Physical addresses of the page that it lies in, and of the next.
    pub phys: [u64; 2],
    /// Page tables have five levels.
    pub five_level: bool,
    /// Local APICs are in x2APIC mode.
    pub x2apic: bool,
}

/// `/sys/kernel/vmcoreinfo`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmCoreInfo {
    /// Physical address of an ELF note.
    pub phys: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// A PCI device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Domain, bus, device and function.
    pub address: String,
    /// Vendor and device, as in `lspci -n`.
    pub id: String,
    /// Class, as in `/sys`.
    pub class: String,
    /// The driver that it had.
    pub driver: Option<String>,
}

/// An IOMMU. Its tables are in memory; its registers the kernel sets anew.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Iommu {
    /// The kernel's name of it.
    pub name: String,
    /// Where its registers are, and what it can do, as far as the kernel says.
    pub registers: Vec<String>,
}

/// A file system that the machine could write to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSystem {
    /// Where it was mounted.
    pub mounted_at: String,
    /// Its type.
    pub kind: String,
    /// The block device.
    pub device: String,
    /// What the file system calls itself, if it does.
    pub uuid: Option<String>,
    /// It was frozen at the instant, and its blocks hold all that was written to it.
    pub frozen: bool,
    /// BLAKE3 of the blocks that change with whatever is written to it, as they were then.
    pub mark: Option<String>,
    /// Where those blocks really lie, if the device is made of others; the mark is of what is there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pieces: Vec<Piece>,
}

/// A stretch of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// What the disk is called by what is written on it.
    pub disk: String,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// How long it is, in bytes.
    pub length: u64,
}
