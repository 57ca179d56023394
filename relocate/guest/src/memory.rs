//! The guest's memory on the host.

use crate::{
    fit::kvm_refused,
    layout::{Layout, MONITOR},
};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_devices::memory::{self, View};
use std::{fmt::Display, fs::File, ops::Range, sync::Arc};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
};

/// Maps memory for the guest, and for the monitor's own pages in it. The host gives a page when it is
/// written for the first time.
///
/// # Errors
/// The host has no room for so much.
pub fn map(layout: &Layout) -> Result<View> {
    View::from_ranges(&ranges(layout)).map_err(|error| no_room(layout, &error))
}

/// Maps a file as the memory for the guest, and for the monitor's own pages: range after range. What is
/// written is the guest's own, and does not go to the file.
///
/// # Errors
/// The host has no room for so much.
pub fn map_file(layout: &Layout, file: &Arc<File>) -> Result<View> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let mut at = 0;
    let mut regions = Vec::new();
    for (start, bytes) in ranges(layout) {
        let part = Some(FileOffset::from_arc(Arc::clone(file), at));
        let mapped = MmapRegion::build(part, bytes, access, libc::MAP_PRIVATE | libc::MAP_NORESERVE);
        let mapped = mapped.map_err(|error| no_room(layout, &error))?;
        let region = GuestRegionMmap::new(mapped, start);
        regions.push(region.ok_or_else(|| no_room(layout, &"its addresses have no end"))?);
        at += bytes as u64;
    }
    View::from_regions(regions).map_err(|error| no_room(layout, &error))
}

/// Returns the ranges of memory in ascending order: the guest's and the monitor's.
pub(crate) fn ranges(layout: &Layout) -> Vec<(GuestAddress, usize)> {
    let bytes = |range: &Range<u64>| usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
    let mut ranges: Vec<Range<u64>> = layout.ranges().to_vec();
    ranges.push(MONITOR);
    ranges.sort_by_key(|range| range.start);
    ranges.iter().map(|range| (GuestAddress(range.start), bytes(range))).collect()
}

fn no_room(layout: &Layout, error: &dyn Display) -> Error {
    let text = format!("cannot map {} MiB for the guest's memory: {error}", layout.bytes() >> 20);
    Error::new(Exit::Impossible, text).hint("free memory on this host, or raise `ulimit -v`")
}

/// Gives the memory to the guest, region after region: the first is slot 0. KVM logs what processors write,
/// if `flags` say so. The same memory can be given again with other flags.
///
/// # Errors
/// KVM refuses a range.
pub fn give(vm: &VmFd, view: &View, flags: u32) -> Result<()> {
    for (slot, region) in (0..).zip(view.iter()) {
        let start = region.start_addr().0;
        let wrong = |why: String| kvm_refused(&format!("take the guest's memory at {start:#x}"), why);
        let host =
            memory::pointer(view, start, region.len()).ok_or_else(|| wrong("it is not there".into()))?;
        let described = kvm_userspace_memory_region {
            slot,
            flags,
            guest_phys_addr: start,
            memory_size: region.len(),
            userspace_addr: host.expose_provenance() as u64,
        };
        // SAFETY: The view keeps the memory mapped, and outlives the guest.
        unsafe { vm.set_user_memory_region(described) }.map_err(|error| wrong(error.to_string()))?;
    }
    Ok(())
}
