//! The wire format: the bytes on a connection between two authenticated ends.
//!
//! # The format
//!
//! Numbers are little-endian. A stream is, in each direction, a greeting of 32 bytes ([`MAGIC`],
//! [`VERSION`] as four bytes, the number of the stream as four, the attempt), and then frames. A
//! frame is a header of 32 bytes and its payload:
//!
//! | bytes | what |
//! |-------|------|
//! | 4     | kind: 1 message, 2 round, 3 pages, 4 proof, 5 chunks |
//! | 4     | length of the payload in bytes |
//! | 8     | number of the frame in this stream, from 0 |
//! | 16    | the first half of BLAKE3 of the greeting, of the 16 bytes before it and of the payload |
//!
//! - A *message* is a word of the [protocol](crate::protocol) (1 byte), its digest (32, zeros if it
//!   has none), and at most [`TEXT_MAX`] bytes of text. Long texts are [packed](pack_text).
//! - A *round* is the number of the round that begins (8 bytes), from 0, each one more than the one
//!   before. Either end sends one as well as a sign of life, while it works and has no word to say.
//! - *Pages* are the length before compression (4 bytes) and a zstd frame of: the number of entries
//!   (4), the entries (8 each), and 4,096 bytes for each entry that has data. An entry is a page's
//!   physical address, with the kind of its content in the low twelve bits: 1 the next page of
//!   data, 2 all zeros, 3 the same as the entry before it. No record depends on another, so that
//!   several streams need no order among them.
//! - A *proof* (32 bytes) is the first frame of a stream other than stream 0, and occurs nowhere
//!   else ([`streams`](crate::streams)).
//! - *Chunks* are parts of a disk: the length before compression (4 bytes) and a zstd frame of: the
//!   number of the disk in the offer (4), the number of entries (4), the entries (12 each), and the
//!   data of those that have some. An entry is the chunk's offset on the disk, with the kind of its
//!   content in the low nine bits (8): 1 data, 2 all zeros; and its length (4). Disks are divided
//!   as [`DiskLedger`] says.
//!
//! The checksum detects errors of a broken machine; the session keeps attackers out. An
//! authenticated sender is not trusted either: lengths are limited before memory is allocated,
//! pages must lie in the offered memory ([`Ledger`]), and a refusal names the place.

mod chunks;
mod error;
mod ledger;
mod packed;
mod pages;
mod stream;
mod text;

pub use chunks::{CHUNKS_BYTES_MAX, Chunk, Chunks, DiskLedger, chunk_shift, hash_of_chunk};
pub use error::{Error, Place, Result};
pub use ledger::{Ledger, hash_of};
pub use pages::{Content, PAGE, PAGES_MAX, Page, Pages};
pub use stream::{Frame, MAGIC, Reader, TEXT_MAX, VERSION, Writer};
pub use text::{pack_text, unpack_text};
