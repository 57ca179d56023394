//! The types of file systems that have a *fingerprint*: a hash of the bytes that change with every write.
//!
//! One table answers every question that depends on the type:
//!
//! - the magic number, and the place of the identity (UUID) in the first blocks;
//! - the byte ranges that change with every write. A layout that needs more than a line has a file of its
//!   own: [`fat`], [`xfs`];
//! - late writes: a fingerprint that stays unchanged for a while after a write;
//! - mount options and kernel modules for the restore environment.
//!
//! A new type is a new variant of [`Kind`]: the compiler names each function that lacks an answer. Types
//! without a fingerprint stand in lists.

pub mod fat;
mod xfs;

use std::{io, ops::Range};

/// Types that have a folder in `/sys/fs` for each live file system, by the name of its device.
pub(crate) const LISTED_BY_DEVICE: [&str; 4] = ["ext4", "xfs", "f2fs", "erofs"];
/// Types with a server that mountinfo names.
pub(crate) const SERVER_NAMED: [&str; 4] = ["nfs", "nfs4", "cifs", "smb3"];
/// Types with servers that no single place names.
pub(crate) const SERVER_UNNAMED: [&str; 8] =
    ["ceph", "lustre", "afs", "gpfs", "beegfs", "glusterfs", "ocfs2", "gfs2"];

/// A type of file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// ext2, ext3 and ext4, which one driver serves.
    Ext,
    Xfs,
    Btrfs,
    /// FAT12, FAT16 and FAT32, with long names.
    Vfat,
}

impl Kind {
    /// Returns the type that the kernel calls so in mountinfo, or nothing if its changes are unknown.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        match name {
            "ext2" | "ext3" | "ext4" => Some(Self::Ext),
            "xfs" => Some(Self::Xfs),
            "btrfs" => Some(Self::Btrfs),
            "vfat" => Some(Self::Vfat),
            _ => None,
        }
    }

    /// Returns the identity of a file system of this type that begins with these bytes.
    #[must_use]
    pub fn identity_in(self, first: &[u8]) -> Option<String> {
        let is = |at: usize, magic: &[u8]| first.get(at..at + magic.len()) == Some(magic);
        let at = match self {
            Self::Ext if is(0x438, &[0x53, 0xEF]) => 0x468..0x478,
            Self::Xfs if is(0, b"XFSB") => 32..48,
            Self::Btrfs if is(0x1_0040, b"_BHRfS_M") => 0x1_0020..0x1_0030,
            Self::Vfat if is(0x52, b"FAT32") => 0x43..0x47,
            Self::Vfat if is(0x36, b"FAT12   ") || is(0x36, b"FAT16   ") => 0x27..0x2B,
            _ => return None,
        };
        first.get(at).map(|bytes| bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Returns the byte ranges that change with every write, or nothing if the layout is unknown. The file
    /// system begins with `first`; `read` reads more of it.
    ///
    /// # Errors
    ///
    /// Returns an error if `read` does.
    pub fn changing(
        self,
        first: &[u8],
        read: impl Fn(Range<u64>) -> io::Result<Vec<u8>>,
    ) -> io::Result<Option<Vec<Range<u64>>>> {
        let superblock = 0..first.len() as u64;
        match self {
            Self::Ext | Self::Btrfs => Ok(Some(vec![superblock])),
            Self::Xfs => Ok(xfs::log(first).map(|log| vec![superblock, log])),
            Self::Vfat => fat::Layout::new(first).map(|layout| layout.changing(superblock, read)).transpose(),
        }
    }

    /// Returns true if the fingerprint may stay unchanged for a while after a write: XFS and btrfs record the
    /// time of an overwritten file late. ext4 writes its superblock with every thaw.
    #[must_use]
    pub fn is_lazy(self) -> bool {
        matches!(self, Self::Xfs | Self::Btrfs)
    }

    /// Returns true if the log is emptied only in a freeze.
    #[must_use]
    pub fn empties_log_in_freeze(self) -> bool {
        self == Self::Xfs
    }

    /// Returns true if mounts have device numbers of their own, although the file system is on a device.
    #[must_use]
    pub fn has_own_numbers(self) -> bool {
        self == Self::Btrfs
    }

    /// Returns the options of a mount that replays no journal.
    #[must_use]
    pub fn mount_options(self) -> &'static str {
        match self {
            Self::Ext => "noload",
            Self::Xfs => "norecovery",
            // The mounted root may be a subvolume, so the whole file system is mounted instead.
            Self::Btrfs => "rescue=nologreplay,subvolid=5",
            Self::Vfat => "",
        }
    }

    /// Returns the kernel modules that a mount needs.
    #[must_use]
    pub fn modules(self) -> &'static [&'static str] {
        match self {
            Self::Ext => &["ext4"],
            Self::Xfs => &["xfs"],
            Self::Btrfs => &["btrfs"],
            // The encodings of names are modules of their own.
            Self::Vfat => &["vfat", "nls_cp437", "nls_iso8859-1", "nls_ascii"],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity_in(first: &[u8], kind: &str) -> Option<String> {
        Kind::of(kind)?.identity_in(first)
    }

    #[test]
    fn fat_of_each_size_is_known() {
        let wide = fat::tests::first_sector(b"FAT32   ", 1 << 20, 1000, 8, 0);
        assert_eq!(identity_in(&wide, "vfat").as_deref(), Some("01020304"));
        for kind in [b"FAT12   ", b"FAT16   "] {
            let small = fat::tests::first_sector(kind, 2880, 9, 1, 224);
            assert_eq!(identity_in(&small, "vfat").as_deref(), Some("abcdef01"));
            assert_eq!(identity_in(&small, "ext4"), None);
        }
        assert_eq!(identity_in(&[0; 512], "vfat"), None);
    }

    #[test]
    fn others_are_known_by_their_magic_number() {
        let with = |at: usize, magic: &[u8], uuid: usize, kind: &str| {
            let mut first = vec![0; 0x1_1000];
            first[uuid..uuid + 16].fill(0x5A);
            assert_eq!(identity_in(&first, kind), None, "{kind}");
            first[at..at + magic.len()].copy_from_slice(magic);
            assert_eq!(identity_in(&first, kind), Some("5a".repeat(16)), "{kind}");
            assert_eq!(identity_in(&first, "iso9660"), None);
        };
        with(0x438, &[0x53, 0xEF], 0x468, "ext4");
        with(0, b"XFSB", 32, "xfs");
        with(0x1_0040, b"_BHRfS_M", 0x1_0020, "btrfs");
    }
}
