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
use std::ops::Range;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

/// Maps memory for the guest, and for the monitor's own pages in it. The host gives a page when it is
/// written for the first time.
///
/// # Errors
/// The host has no room for so much.
pub fn map(layout: &Layout) -> Result<View> {
    let bytes = |range: &Range<u64>| usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
    let mut ranges: Vec<Range<u64>> = layout.ranges().to_vec();
    ranges.push(MONITOR);
    ranges.sort_by_key(|range| range.start);
    let ranges: Vec<_> = ranges.iter().map(|range| (GuestAddress(range.start), bytes(range))).collect();
    View::from_ranges(&ranges).map_err(|error| {
        let text = format!("cannot map {} MiB for the guest's memory: {error}", layout.bytes() >> 20);
        Error::new(Exit::Impossible, text).hint("free memory on this host, or raise `ulimit -v`")
    })
}

/// Gives the memory to the guest.
///
/// # Errors
/// KVM refuses a range.
pub fn give(vm: &VmFd, view: &View) -> Result<()> {
    for (slot, region) in (0..).zip(view.iter()) {
        let start = region.start_addr().0;
        let wrong = |why: String| kvm_refused(&format!("take the guest's memory at {start:#x}"), why);
        let host =
            memory::pointer(view, start, region.len()).ok_or_else(|| wrong("it is not there".into()))?;
        let described = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: start,
            memory_size: region.len(),
            userspace_addr: host.expose_provenance() as u64,
        };
        // SAFETY: The view keeps the memory mapped, and outlives the guest.
        unsafe { vm.set_user_memory_region(described) }.map_err(|error| wrong(error.to_string()))?;
    }
    Ok(())
}
