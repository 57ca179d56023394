//! Leaves of CPUID with features that programs find by themselves, without a name of the kernel's.

use mercury_image::Leaf;
use std::arch::x86_64::{__cpuid, __cpuid_count};

/// Leaves and subleaves with features (SDM volume 2A, CPUID; APM volume 3, appendix E).
const LEAVES: [(u32, u32); 8] =
    [(1, 0), (7, 0), (7, 1), (0xD, 1), (0x1E, 1), (0x24, 0), (0x8000_0001, 0), (0x8000_0008, 0)];

/// Returns the leaves that this processor has.
#[must_use]
pub fn leaves() -> Vec<Leaf> {
    let has = |function: u32| function <= __cpuid(function & 0x8000_0000).eax;
    let of = |(function, index)| {
        let found = __cpuid_count(function, index);
        Leaf { function, index, words: [found.eax, found.ebx, found.ecx, found.edx] }
    };
    LEAVES.into_iter().filter(|one| has(one.0)).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_leaf_has_what_each_processor_here_has() {
        const SSE2: u32 = 1 << 26;
        let found = leaves();
        assert!(found[0].function == 1 && found[0].words[3] & SSE2 != 0, "{found:?}");
        assert!(found.iter().any(|leaf| leaf.function == 0x8000_0001));
    }
}
