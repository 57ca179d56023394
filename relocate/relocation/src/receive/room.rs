//! A check that the restore environment has the memory it needs while a machine arrives. The
//! machine's own pages are outside this kernel's memory. The need grows with them anyway: a hash
//! for each page, and the driver's records.
//!
//! Without that memory the kernel would kill the largest process, which is the receiver, and the
//! source would go on. This check refuses the machine before the first page instead.

use crate::migrate::{
    disk,
    offer::{Offer, kept},
};
use mercury_control::{output::bytes, sysroot::Sysroot};
use mercury_migration::wire::PAGE;

/// Bytes for each page: its hash, the bits that say that it has arrived, and the entry of the table
/// that maps it.
const PAGE_COSTS: u64 = 16 + 1 + 8;
/// Bytes for each stream: a received frame, its unpacked pages, the data read back; and its
/// connection.
const STREAM_COSTS: u64 = 4 << 20;
/// Bytes that the kernel needs besides, for cards and disks.
const LEFT: u64 = 4 << 20;

/// Returns the bytes of memory that are needed to receive this machine.
fn needed(offer: &Offer) -> u64 {
    let memory: u64 = kept(&offer.machine).iter().map(|range| range.end - range.start).sum();
    let disks: Vec<_> = offer.disks.iter().map(|one| one.disk.bytes).collect();
    let remembered = (memory / PAGE as u64).saturating_mul(PAGE_COSTS);
    let streams = u64::from(offer.streams) * STREAM_COSTS;
    remembered.saturating_add(streams).saturating_add(disk::memory(&disks) << 20).saturating_add(LEFT)
}

/// Returns the reason if there is too little memory to receive this machine.
#[must_use]
pub fn lacking(offer: &Offer, sysroot: &Sysroot) -> Option<String> {
    let (needed, available) = (needed(offer), sysroot.available_memory()?);
    eprintln!(
        "mercury: receiving it needs {} of the restore environment's memory; {} are free",
        bytes(needed),
        bytes(available)
    );
    (needed > available).then(|| {
        format!(
            "the destination's restore environment has {} of memory free, and needs {} to receive the \
             machine; `mercury receive --memory` gives it more",
            bytes(available),
            bytes(needed)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_image::{Kind, Machine, Range};
    use mercury_migration::wire::Ledger;
    use std::fs;

    fn offer(pages: u64, streams: u32) -> Offer {
        let ranges = vec![Range { start_phys: 0x10_0000, pages, kind: Kind::Kept }];
        Offer { machine: Machine { ranges, ..Machine::default() }, streams, ..Offer::default() }
    }

    #[test]
    fn a_lack_of_room_is_refused_with_numbers() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join("proc")).expect("a folder");
        let with = |kib: u64| {
            let text = format!("MemTotal: 999999 kB\nMemAvailable: {kib:>9} kB\n");
            fs::write(folder.path().join("proc/meminfo"), text).expect("a file");
            Sysroot::at(folder.path())
        };
        // 16 GiB by two streams: 100 MiB for pages, and 12.
        let machine = offer(4 << 20, 2);
        assert_eq!(lacking(&machine, &with(112 << 10)), None);
        let why = lacking(&machine, &with((112 << 10) - 1)).expect("refused");
        assert!(why.contains("needs 112 MiB") && why.contains("receive --memory"), "{why}");
        assert!(lacking(&offer(u64::MAX >> 13, 16), &with(1 << 20)).is_some());
        assert_eq!(lacking(&machine, &Sysroot::at("/nowhere")), None, "a kernel that does not say so");
    }

    /// The estimate for each page is no less than the ledger's actual size.
    #[test]
    fn a_ledger_fits() {
        let pages = 1 << 16;
        let ledger = Ledger::new(offer(pages, 1).memory());
        assert!(ledger.bytes() as u64 <= pages * PAGE_COSTS, "{}", ledger.bytes());
    }
}
