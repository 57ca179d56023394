//! The file that holds a whole machine: all its memory at one instant, and what else it takes to go on from there.
//!
//! # The format
//!
//! Numbers are little-endian. The file is [`MAGIC`], then [`VERSION`] as four bytes, then records, the last of which
//! is the commit record; behind it comes nothing. A file can be written and read in one pass, from first byte to last.
//!
//! A record is a header of 80 bytes and its payload:
//!
//! | bytes | what |
//! |-------|------|
//! | 4     | `MREC` |
//! | 4     | its kind: 1 [`Machine`], 2 frames, 3 commit, 4 hashes |
//! | 8     | its number, from 0 |
//! | 16    | the image's identity, random |
//! | 8     | length of the payload |
//! | 8     | length of the payload before compression |
//! | 32    | BLAKE3 of the 48 bytes before it and of the payload |
//!
//! * Record 0 is the [`Machine`], as JSON that is not compressed.
//! * A record of *frames* is a zstd frame of: the number of entries (8 bytes), the entries (16 bytes each), then 4,096
//!   bytes for each entry that has data. An entry is the frame's physical address, and where its content is from:
//!   1 the next page of this record, 2 all zeros, `n << 12 | 3` in the parent, as are the n - 1 frames behind it,
//!   otherwise the address of a frame before it with the same content. Each frame of the machine's memory occurs once.
//! * A record of *hashes* is a zstd frame of: the key (32 bytes), the number of entries (8), the entries, an address and
//!   a number of frames from there on (16), and a hash of each of these frames (16): half of its BLAKE3 with the key, or zeros if it is all zeros. Every frame of the
//!   machine has one, in [`order`].
//! * The *commit* record ([`Commit`], as JSON) says how much there was, and has the BLAKE3 of all records' checksums.
//!
//! So a file that was torn, cut short, mixed with another or changed in any bit is found out, and the place is named,
//! before anything that depends on all of it is done: see [`Reader`].

//!
//! # Images made on images
//!
//! An image may leave out what has not changed since another one, its parent. It names that, and all that those are made
//! on ([`Machine::parents`]), and still has a hash of every frame: so the next one can be made on it alone ([`Parent`]).
//! A machine comes out of all of them together ([`Chain`]).
//!
//! Version 1 had neither.

mod chain;
mod error;
mod hashes;
mod machine;
mod pack;
mod parent;
mod reader;
mod record;
mod writer;

pub use chain::{Chain, Merged, PARENTS_MAX};
pub use error::{Error, Place, Result};
pub use hashes::{Hash, Hashes, Key, Run, order};
pub use machine::{
    Cpu, Device, FileSystem, FirmwareRange, Iommu, Kind, Machine, Piece, Processor, Range, Resume, VmCoreInfo,
};
pub use pack::Packer;
pub use parent::Parent;
pub use reader::{Reader, verify};
pub use record::{
    Chunk, Commit, Compressed, Frame, Identity, MAGIC, PAGE, Part, Source, VERSION, VERSION_OLDEST,
};
pub use writer::Writer;

/// The kernel that brings a machine back lies below. What is above comes first in an image: there it finds homes of
/// zeros, where what is below can wait.
pub const LOW_END_PHYS: u64 = 256 << 20;
