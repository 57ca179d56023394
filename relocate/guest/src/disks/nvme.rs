//! Disks on NVMe.

use super::{Controller, Kind, Known, Opened, device, function, given};
use mercury_control::output::bytes;
use mercury_controllers::nvme::{Identity, Limits, Namespace};
use mercury_image::{Machine, NvmeController, NvmeDisk};

/// Number of the base address register with a controller's registers.
pub const REGISTERS: usize = 0;
/// Entries of a queue if the image does not say how many the machine's controller has.
const QUEUE_ENTRIES: u32 = 1024;
/// Largest number of pairs of queues that a driver gets.
const PAIRS_MAX: u64 = 256;
/// Registers of a controller before its doorbells, and the size of the doorbells of a pair of queues.
const BEFORE_DOORBELLS: u64 = 0x1000;
const DOORBELLS: u64 = 8;

/// Lists the disks of a controller.
pub fn disks(controller: &NvmeController) -> impl Iterator<Item = Known<'_>> {
    controller.disks.iter().map(|disk| Known { name: &disk.name, label: label(controller, disk) })
}

/// Describes a disk so that an operator finds its content.
fn label(controller: &NvmeController, disk: &NvmeDisk) -> String {
    let size = Namespace::measure(&disk.identify).map(|(shift, blocks)| bytes(blocks << shift));
    let size = size.unwrap_or_else(|_| "of unknown size".into());
    match Identity::new(&controller.identify) {
        Ok(identity) => {
            format!("{} ({}, serial number {}, {size})", disk.name, identity.model(), identity.serial())
        }
        Err(_) => format!("{} ({size})", disk.name),
    }
}

/// Plans a controller, if one of its disks was given.
pub fn plan(
    machine: &Machine,
    theirs: &NvmeController,
    opened: &[Opened<'_>],
) -> Option<Result<Controller, String>> {
    let disks: Vec<_> =
        theirs.disks.iter().filter_map(|disk| Some((disk, given(opened, &disk.name)?))).collect();
    (!disks.is_empty()).then(|| controller(machine, theirs, &disks))
}

fn controller(
    machine: &Machine,
    theirs: &NvmeController,
    disks: &[(&NvmeDisk, &Opened<'_>)],
) -> Result<Controller, String> {
    let device = device(machine, &theirs.address)?;
    if !theirs.has_messages {
        return Err("it raises interrupts without messages (MSI-X, MSI)".into());
    }
    if theirs.has_memory {
        return Err("it has queues in memory of its own (CMB)".into());
    }
    let function = function(device)?;
    let pairs = function.registers_end(0).saturating_sub(BEFORE_DOORBELLS) / DOORBELLS;
    let vectors = function.vectors();
    if pairs < 2 || vectors == 0 {
        return Err("its PCI device has no room for queues or interrupts".into());
    }
    let entries = if theirs.queue_entries == 0 { QUEUE_ENTRIES } else { theirs.queue_entries };
    let limits = Limits {
        pairs: (pairs - 1).min(PAIRS_MAX) as u16,
        entries: entries.clamp(2, u32::from(u16::MAX)) as u16,
        vectors,
    };
    let identity = Identity::new(&theirs.identify)?;
    let namespaces = disks.iter().map(|(disk, opened)| namespace(disk, opened)).collect::<Result<_, _>>()?;
    let kind = Kind::Nvme { identity, namespaces, limits };
    Ok(Controller { address: theirs.address.clone(), function, kind })
}

fn namespace(disk: &NvmeDisk, opened: &Opened<'_>) -> Result<Namespace, String> {
    let of = |why: String| format!("{}: {why}", disk.name);
    let (shift, blocks) = Namespace::measure(&disk.identify).map_err(of)?;
    let content = opened.content(Some(blocks << shift))?;
    Namespace::new(disk.namespace, &disk.identify, &disk.identifiers, content).map_err(of)
}
