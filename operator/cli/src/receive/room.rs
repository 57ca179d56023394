//! Whether the small system has the memory that it needs while a machine comes. The machine's own memory is none of it: pages lie
//! beyond this kernel's. What is needed grows with it all the same: a hash for each page, and what the driver notes of each.
//!
//! If that is not there the kernel kills whoever has most, which is who receives. The source goes on then; but it is said before
//! the first page.

use crate::{
    migrate::{
        disk,
        offer::{Offer, kept},
    },
    output::bytes,
    sysroot::Sysroot,
};
use mercury_migration::wire::PAGE;

/// For each page: its hash, the bits that say that it is there, and the entry of the table that maps it.
const PAGE_COSTS: u64 = 16 + 1 + 8;
/// What one stream has at once: a frame as it came, what was in it, and what lies in its place; and its connection.
const STREAM_COSTS: u64 = 4 << 20;
/// What the kernel has to have besides, for cards and disks.
const LEFT: u64 = 4 << 20;

/// Bytes of memory that it takes to receive this.
fn needed(offer: &Offer) -> u64 {
    let memory: u64 = kept(&offer.machine).iter().map(|range| range.end - range.start).sum();
    let disks: Vec<_> = offer.disks.iter().map(|one| one.disk.bytes).collect();
    let remembered = (memory / PAGE as u64).saturating_mul(PAGE_COSTS);
    let streams = u64::from(offer.streams) * STREAM_COSTS;
    remembered.saturating_add(streams).saturating_add(disk::memory(&disks) << 20).saturating_add(LEFT)
}

/// Why there is no room for what has to be remembered of it, if there is none.
#[must_use]
pub fn lacking(offer: &Offer, sysroot: &Sysroot) -> Option<String> {
    let (needed, available) = (needed(offer), sysroot.available_memory()?);
    eprintln!(
        "mercury: to take it in needs {} of this small system's memory; {} are free",
        bytes(needed),
        bytes(available)
    );
    (needed > available).then(|| {
        format!(
            "the spare's small system has {} of memory free, and needs {} to take it in; `mercury receive --memory` gives it more",
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
    fn what_does_not_fit_is_refused_with_numbers() {
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

    /// What is reckoned for each page is no less than what is kept of it.
    #[test]
    fn a_ledger_fits() {
        let pages = 1 << 16;
        let ledger = Ledger::new(offer(pages, 1).memory());
        assert!(ledger.bytes() as u64 <= pages * PAGE_COSTS, "{}", ledger.bytes());
    }
}
