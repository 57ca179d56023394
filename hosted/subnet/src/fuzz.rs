//! A ring whose other end follows arbitrary bytes.

use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use vm_memory::Bytes;

use crate::{
    memory::{Access, Memory, make_file},
    message::{Answer, Request},
    offload::{Accepted, Offload},
    ring::{LONGEST, Reader, Ring, SHORTEST, SIZE, Writer},
};

/// Inputs to begin with: frames that are written and read; a head that jumps; a record that is replaced.
pub const SEEDS: &[&[u8]] = &[
    &[0, 60, 0, 1, 0, 200, 5, 1, 1, 2, 0, 255, 255, 1],
    &[0, 60, 0, 3, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0, 1, 3, 1, 16, 0, 0, 0, 0, 0, 0, 0, 0, 60, 0, 1],
    &[0, 60, 0, 4, 0, 0, 0x3C, 0, 0, 0, 1, 0, 0, 0, 3, 0, 80, 0, 0, 0, 0, 0, 0, 0, 1, 5],
];
/// Largest number of steps of one input.
const STEPS: usize = 300;
/// Offsets of the numbers that the other end may change: see [`crate::ring`].
const NUMBERS: [usize; 2] = [0, 64];
const FLAGS: [usize; 2] = [72, 76];

/// Bytes of an input, from which numbers are taken. After the last byte there are zeros.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn number(&mut self, bytes: u32) -> u64 {
        (0..bytes).fold(0, |number, at| {
            let Some((first, rest)) = self.0.split_first() else { return number };
            self.0 = rest;
            number | u64::from(*first) << (8 * at)
        })
    }
}

/// Runs both ends of a ring, and lets the input change the ring's memory.
///
/// # Panics
/// If a frame is not what a frame has to be.
pub fn run(bytes: &[u8]) {
    let _ = (Request::from_bytes(bytes), Answer::from_bytes(bytes));
    let Ok(file) = make_file("mercury-fuzz-ring", SIZE as u64) else { return };
    let Ok(memory) = Memory::map(&file, 0, SIZE, Access::Write) else { return };
    let memory = Arc::new(memory);
    let Some(ring) = Ring::new(&memory, 0) else { return };
    let (mut writer, mut reader) = (Writer::new(ring.clone()), Reader::new(ring.clone()));
    let mut input = Input(bytes);
    for _ in 0..STEPS {
        if input.0.is_empty() {
            break;
        }
        match input.number(1) % 8 {
            0 => {
                let length = input.number(2) as usize;
                writer.write(length, Offload::default(), |to| {
                    assert_eq!(to.len(), length);
                    let _ = to.write_slice(&[1; 14], 0);
                });
            }
            1 => read(&mut reader),
            2 => {
                reader.release();
            }
            3 => {
                let at = NUMBERS[input.number(1) as usize % 2];
                memory.number::<AtomicU64>(at).store(input.number(8), Ordering::Relaxed);
            }
            4 => {
                // The beginning of a record, or bytes of a frame, in the first pages.
                let at = 128 + (input.number(2) as usize & !7);
                memory.number::<AtomicU64>(at).store(input.number(8), Ordering::Relaxed);
            }
            5 => {
                reader.sleep();
                writer.wait();
            }
            6 => {
                let at = FLAGS[input.number(1) as usize % 2];
                memory.number::<AtomicU32>(at).store(input.number(4) as u32, Ordering::Relaxed);
            }
            _ => (writer, reader) = (Writer::new(ring.clone()), Reader::new(ring.clone())),
        }
    }
    goes_on(ring, &mut reader);
}

/// Reads a frame, and does what its sender has left.
fn read(reader: &mut Reader) {
    let Some(frame) = reader.front() else { return };
    assert!((SHORTEST..=LONGEST).contains(&frame.bytes.len()));
    let mut bytes = vec![0; frame.bytes.len()];
    assert!(frame.bytes.read_slice(&mut bytes, 0).is_ok());
    let offload = frame.offload;
    if !offload.suits(Accepted::default()) {
        let frames = offload.complete(bytes);
        assert!(frames.iter().all(|one| one.len() <= LONGEST));
    }
    reader.release();
}

/// Whatever was in the memory: frames of a writer that comes afterwards arrive.
fn goes_on(ring: Ring, reader: &mut Reader) {
    ring.clear();
    let mut writer = Writer::new(ring);
    // The first one may go with what the reader gives up.
    for _ in 0..3 {
        writer.write(60, Offload::default(), |to| {
            let _ = to.write_slice(&[7; 60], 0);
        });
        while let Some(frame) = reader.front() {
            let mut bytes = [0; 60];
            if frame.bytes.len() == 60 && frame.bytes.read_slice(&mut bytes, 0).is_ok() && bytes == [7; 60] {
                return;
            }
            reader.release();
        }
    }
    panic!("a new writer's frames do not arrive");
}
