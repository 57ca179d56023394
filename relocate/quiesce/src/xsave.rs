//! The layout of a processor's extended state (Intel SDM vol. 1, 13.4; APM vol. 2, 11.5).

use mercury_image::StateComponent;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

/// Leaf of CPUID that describes the extended state, one component in each subleaf from 2 on.
const LEAF: u32 = 0xD;
const OSXSAVE: u32 = 1 << 27;
/// Components that programs have. The first two lie at fixed places.
const FIRST: u32 = 2;
const LAST: u32 = 62;

/// Returns the components of the extended state that the kernel has enabled for programs.
#[must_use]
pub fn components() -> Vec<StateComponent> {
    if __cpuid(1).ecx & OSXSAVE == 0 {
        return Vec::new();
    }
    // SAFETY: The kernel has enabled the instruction, by the bit above.
    let enabled = unsafe { xcr0() };
    let of = |number: u32| {
        let leaf = __cpuid_count(LEAF, number);
        StateComponent { number, bytes: leaf.eax, offset: leaf.ebx, flags: leaf.ecx }
    };
    (FIRST..=LAST).filter(|number| enabled >> number & 1 != 0).map(of).collect()
}

/// # Safety
/// CR4.OSXSAVE is set.
#[target_feature(enable = "xsave")]
unsafe fn xcr0() -> u64 {
    // SAFETY: The caller answers for it. Register 0 is always there.
    unsafe { _xgetbv(0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares the layout with the size that the processor states for all that is enabled.
    #[test]
    fn the_components_fill_the_area() {
        let found = components();
        let end = found.iter().map(|one| one.offset + one.bytes).max().unwrap_or(0);
        assert_eq!(end, if found.is_empty() { 0 } else { __cpuid_count(LEAF, 0).ebx });
        assert!(found.iter().all(|one| one.bytes > 0 && one.offset >= 576), "{found:?}");
    }
}
