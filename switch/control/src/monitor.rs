//! Mercury's monitor, which runs a machine as a guest of another one.

use mercury_abi::guest::{
    MERCURY_GUEST_LEAF, MERCURY_GUEST_LEAF_DESCRIPTION, MERCURY_GUEST_SIGNATURE_EBX,
    MERCURY_GUEST_SIGNATURE_ECX, MERCURY_GUEST_SIGNATURE_EDX,
};
use std::arch::x86_64::__cpuid;

/// Returns true if Mercury's monitor runs this machine as a guest.
#[must_use]
pub fn is_guest() -> bool {
    let leaf = __cpuid(MERCURY_GUEST_LEAF);
    [leaf.ebx, leaf.ecx, leaf.edx]
        == [MERCURY_GUEST_SIGNATURE_EBX, MERCURY_GUEST_SIGNATURE_ECX, MERCURY_GUEST_SIGNATURE_EDX]
}

/// Returns the first port for calls of the monitor that runs this machine as a guest, if it answers calls.
#[must_use]
pub fn ports() -> Option<u16> {
    let port = __cpuid(MERCURY_GUEST_LEAF_DESCRIPTION).ecx as u16;
    (is_guest() && port != 0).then_some(port)
}
