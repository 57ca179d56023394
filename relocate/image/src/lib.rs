//! The file that holds a whole machine: all its memory at one instant, and everything else that a
//! restart needs.
//!
//! # The format
//!
//! Numbers are little-endian. The file is [`MAGIC`], then [`VERSION`] as four bytes, then records.
//! The commit record is the last, and nothing follows it. A file can be written and read in one
//! pass, from the first byte to the last.
//!
//! A record is a header of 80 bytes and its payload:
//!
//! | bytes | what |
//! |-------|------|
//! | 4     | `MREC` |
//! | 4     | kind: 1 [`Machine`], 2 frames, 3 commit, 4 hashes |
//! | 8     | number of the record, from 0 |
//! | 16    | the image's identity, random |
//! | 8     | length of the payload in bytes |
//! | 8     | length of the payload in bytes before compression |
//! | 32    | BLAKE3 of the 48 bytes before it and of the payload |
//!
//! - Record 0 is the [`Machine`], as JSON that is not compressed.
//! - A record of *frames* is a zstd frame of: the number of entries (8 bytes), the entries (16
//!   bytes each), then 4,096 bytes for each entry that has data. An entry is the frame's physical
//!   address and the source of its content: 1 the next page of this record, 2 all zeros, `n << 12 |
//!   3` the parent, for this frame and the n - 1 frames that follow it, otherwise the address of an
//!   earlier frame with the same content. Each frame of the machine's memory occurs once.
//! - A record of *hashes* is a zstd frame of: the key (32 bytes), the number of entries (8), the
//!   entries, and the hashes. An entry is a physical address and the number of frames from there on
//!   (16 bytes). Each of these frames has a hash (16 bytes): half of its BLAKE3 with the key, or
//!   zeros if the frame is all zeros. Every frame of the machine has a hash, in [`order`].
//! - The *commit* record ([`Commit`], as JSON) states the numbers of records and frames, and has
//!   the BLAKE3 of all records' checksums.
//!
//! A file that was torn, cut short, mixed with another or changed in any bit is therefore detected,
//! and the error names the place. The detection comes before any step that depends on the whole
//! file: see [`Reader`].
//!
//! # Images made on images
//!
//! An image may leave out frames that have not changed since another image, its parent. It names
//! the parent and all images on which that one is made ([`Machine::parents`]). It still holds a
//! hash of every frame, so that the next image can be made on it alone ([`Parent`]). All of them
//! together give the machine ([`Chain`]).
//!
//! Version 1 had neither parents nor hashes.
//!
//! # The note of a return
//!
//! When its machine has come back from an image of `--poweroff`, 0x5EED0000 is added to the version
//! ([`Start`]). Nothing else of an image ever changes.

mod chain;
mod error;
mod firmware;
mod hashes;
mod hexadecimal;
mod machine;
mod pack;
mod parent;
mod reader;
mod record;
mod restored;
mod writer;

pub use chain::{Chain, Merged, PARENTS_MAX};
pub use error::{Error, Place, Result};
pub use firmware::FirmwareMemory;
pub use hashes::{Hash, Hashes, Key, Run, order};
pub use machine::{
    AhciController, AhciDisk, AhciPort, Bar, Cpu, Device, DiskPart, FileSystem, FirmwareRange, Iommu, Kind,
    Leaf, Machine, NvmeController, NvmeDisk, Piece, Processor, Range, Resume, StateComponent, SwapArea,
    Timers, VmCoreInfo,
};
pub use pack::Packer;
pub use parent::Parent;
pub use reader::{Reader, verify};
pub use record::{
    Chunk, Commit, Compressed, Frame, Identity, MAGIC, PAGE, Part, Source, VERSION, VERSION_OLDEST,
};
pub use restored::{START, Start};
pub use writer::Writer;

/// Physical address below which the restore environment lies. Frames above come first in an image.
/// When frames below arrive, destination frames of zeros above are known, and content that must
/// wait can wait there.
pub const LOW_END_PHYS: u64 = 256 << 20;
