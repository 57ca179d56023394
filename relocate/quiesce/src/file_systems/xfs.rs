//! XFS: the log, which changes with every write (`xfs_dsb` in the kernel's `fs/xfs/libxfs/xfs_format.h`).

use std::ops::Range;

/// Returns the range of XFS's log on the device in bytes, from its superblock.
pub fn log(superblock: &[u8]) -> Option<Range<u64>> {
    let word = |at: usize, bytes: usize| {
        superblock
            .get(at..at + bytes)?
            .iter()
            .try_fold(0_u64, |word, byte| Some(word << 8 | u64::from(*byte)))
    };
    let (block, start, blocks) = (word(4, 4)?, word(48, 8)?, word(96, 4)?);
    let (group_blocks, group_bits) = (word(84, 4)?, superblock.get(124).copied()?);
    if word(0, 4)? != 0x5846_5342 || start == 0 || group_bits >= 32 {
        return None;
    }
    let linear = (start >> group_bits) * group_blocks + (start & ((1 << group_bits) - 1));
    let start = linear.checked_mul(block)?;
    Some(start..start.checked_add(blocks.checked_mul(block)?)?)
}
