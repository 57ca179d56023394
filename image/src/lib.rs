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
//! | 4     | its kind: 1 [`Machine`], 2 frames, 3 commit |
//! | 8     | its number, from 0 |
//! | 16    | the image's identity, random |
//! | 8     | length of the payload |
//! | 8     | length of the payload before compression |
//! | 32    | BLAKE3 of the 48 bytes before it and of the payload |
//!
//! * Record 0 is the [`Machine`], as JSON that is not compressed.
//! * A record of *frames* is a zstd frame of: the number of entries (8 bytes), the entries (16 bytes each), then 4,096
//!   bytes for each entry that has data. An entry is the frame's physical address, and where its content is from:
//!   1 the next page of this record, 2 all zeros, otherwise the address of a frame before it with the same content.
//!   Each frame of the machine's memory occurs once.
//! * The *commit* record ([`Commit`], as JSON) says how much there was, and has the BLAKE3 of all records' checksums.
//!
//! So a file that was torn, cut short, mixed with another or changed in any bit is found out, and the place is named,
//! before a byte of what it says is used: see [`Reader`].

mod error;
mod machine;
mod reader;
mod record;
mod writer;

pub use error::{Error, Place, Result};
pub use machine::{
    Cpu, Device, FileSystem, FirmwareRange, Kind, Machine, Processor, Range, Resume, VmCoreInfo,
};
pub use reader::{Reader, verify};
pub use record::{Chunk, Commit, Compressed, Frame, Identity, MAGIC, PAGE, Source, VERSION};
pub use writer::Writer;
