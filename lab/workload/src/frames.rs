//! Reading the frames of a snapshot through the driver.

use std::fs::File;

use mercury_abi::{Header, ioctl::SnapshotReadRequest, snapshot::hash};

use crate::{Result, device};

const PAGE_WORDS: usize = 512;
/// The number of frames of one request.
const BATCH: usize = 256;

/// The frames that a request selects.
#[derive(Clone, Copy)]
pub struct Selection {
    /// The request: frames of the instant, or the present ones.
    pub request: u32,
    /// Bits of `MERCURY_READ_*`.
    pub flags: u64,
    /// True if the hypervisor has hashed the frames at the instant.
    pub hashed: bool,
}

/// A frame that was read.
#[derive(Clone, Copy)]
pub struct Frame {
    pub phys: u64,
    /// Hash of its content.
    pub found: u64,
    /// Hash of the instant; 0 without one.
    pub expected: u64,
}

/// Reads the selected frames in ascending order, and passes each on. Returns their number.
pub fn read(device: &File, selection: Selection, mut each: impl FnMut(Frame)) -> Result<u64> {
    let (mut frames, mut hashes) = (vec![0_u64; BATCH], vec![0_u64; BATCH]);
    let mut data = vec![[0_u64; PAGE_WORDS]; BATCH];
    let (mut cursor, mut count) = (0, 0);
    while cursor != u64::MAX {
        let mut read = SnapshotReadRequest {
            header: Header::of::<SnapshotReadRequest>(),
            cursor_phys: cursor,
            end_phys: u64::MAX,
            count: BATCH as u64,
            frames_addr: address(&mut frames),
            data_addr: address(&mut data),
            hashes_addr: if selection.hashed { address(&mut hashes) } else { 0 },
            flags: selection.flags,
            ..SnapshotReadRequest::default()
        };
        device::request(device, selection.request, &mut read)
            .map_err(|error| device::explain(error, read.outcome))?;
        for ((page, phys), expected) in data.iter().zip(&frames).zip(&hashes).take(read.count as usize) {
            each(Frame { phys: *phys, found: hash(page), expected: *expected });
        }
        count += read.count;
        cursor = read.cursor_phys;
    }
    Ok(count)
}

fn address<T>(room: &mut [T]) -> u64 {
    room.as_mut_ptr().expose_provenance() as u64
}
