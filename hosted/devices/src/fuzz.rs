//! A driver in the guest that follows arbitrary bytes: registers, rings and buffers of a virtio device.

use std::{
    fs::File,
    io::Write,
    os::fd::{AsRawFd, FromRawFd},
};

use vm_memory::GuestAddress;

use crate::{
    Block,
    memory::{self, View},
    rng::Rng,
    state::{Reader, Writer},
    virtio::{Device, Transport},
};

/// Size of the guest's memory in bytes.
const SIZE: u64 = 1 << 20;
/// Physical address at which the second region of the memory begins.
const BORDER: u64 = 0x8000;
/// Size of the disk in bytes.
const DISK: usize = 64 << 10;
/// Largest number of steps of one input.
const STEPS: usize = 200;
/// Physical address of the descriptors. The rings lie one and two pages above.
const RINGS: u64 = 0x1000;

/// Inputs to begin with: a queue that is set up, a chain of a request to read a sector, and a notification.
pub const SEEDS: &[&[u8]] = &[
    &[0, 5, 0, 6, 0, 0x40, 0x1_0, 0, 16, 1, 6, 1, 0x50, 0, 0, 2, 3, 2, 0, 3],
    &[1, 5, 0, 6, 0, 0x40, 0x60, 0, 64, 2, 2, 0, 3, 4, 0x60],
    &[2, 5, 0, 0, 0x04, 0x20, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 3, 4, 0x60],
];

/// Bytes of an input, from which numbers are taken. After the last byte there are zeros.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u64 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        u64::from(*first)
    }

    fn number(&mut self, bytes: u32) -> u64 {
        (0..bytes).fold(0, |number, at| number | self.byte() << (8 * at))
    }
}

/// Gives the input's device a driver that does what the input says.
pub fn run(input: &[u8]) {
    // Two regions, the second of which begins among the buffers.
    let ranges = [(GuestAddress(0), BORDER as usize), (GuestAddress(BORDER), (SIZE - BORDER) as usize)];
    let Ok(view) = View::from_ranges(&ranges) else { return };
    let mut input = Input(input);
    let Some(device) = device(input.byte()) else { return };
    let Ok(mut transport) = Transport::new(device) else { return };
    for _ in 0..STEPS {
        if input.0.is_empty() {
            break;
        }
        step(&mut input, &mut transport, &view);
    }
}

/// Returns the source of random numbers, a disk, or a disk that is read-only.
fn device(choice: u64) -> Option<Box<dyn Device>> {
    if choice.is_multiple_of(3) {
        return Some(Box::new(Rng));
    }
    let mut file = tempfile(DISK)?;
    file.flush().ok()?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Some(Box::new(Block::open(path.as_ref(), choice % 3 == 2).ok()?))
}

fn tempfile(size: usize) -> Option<File> {
    // SAFETY: The name is a string with its end.
    let file = unsafe { libc::memfd_create(c"mercury-fuzz".as_ptr(), libc::MFD_CLOEXEC) };
    if file < 0 {
        return None;
    }
    // SAFETY: The descriptor was made above and belongs to nothing else.
    let mut file = unsafe { File::from_raw_fd(file) };
    file.write_all(&vec![0x5A; size]).ok()?;
    Some(file)
}

fn step(input: &mut Input<'_>, transport: &mut Transport, view: &View) {
    match input.byte() % 8 {
        0 => {
            let (at, value) = (input.number(2) & 0x7FFF, input.number(8));
            let _ = put(view, at & !7, value);
        }
        1 => {
            let (register, value) = (input.byte() * 4 % 0x110, input.number(4));
            transport.write(register, value, view);
        }
        2 => {
            transport.write(0x50, input.byte() % 3, view);
        }
        3 => {
            transport.work(view);
        }
        4 => {
            let _ = transport.read(input.byte() * 4, 4);
        }
        5 => set_up(input.byte() % 2, transport, view),
        6 => save_and_load(input, transport),
        _ => offer(input, view),
    }
}

/// Saves the device, changes the saved bytes, and lets the device take them if it does.
fn save_and_load(input: &mut Input<'_>, transport: &mut Transport) {
    let mut saved = Writer::default();
    transport.save(&mut saved);
    let mut saved = saved.finish();
    for _ in 0..input.byte() % 4 {
        let (at, value) = (input.byte() as usize % saved.len(), input.byte() as u8);
        saved[at] = value;
    }
    let _ = transport.load(&mut Reader::new(&saved));
}

/// Accepts the features and makes a queue of eight entries, as a driver does.
fn set_up(queue: u64, transport: &mut Transport, view: &View) {
    let registers = [(0x70, 0), (0x24, 1), (0x20, 1), (0x70, 8), (0x30, queue), (0x38, 8)];
    let rings = [(0x80, RINGS), (0x90, RINGS + 0x1000), (0xA0, RINGS + 0x2000), (0x44, 1)];
    for (register, value) in registers.into_iter().chain(rings) {
        transport.write(register, value, view);
    }
}

/// Writes a descriptor, and puts its number into the ring of available buffers.
fn offer(input: &mut Input<'_>, view: &View) {
    let number = input.byte() % 8;
    let (address, length) = (input.number(2) << 8, input.number(2));
    let (flags, next) = (input.byte() % 8, input.byte() % 9);
    let at = RINGS + number * 16;
    let _ = put(view, at, address);
    let _ = put(view, at + 8, length | flags << 32 | next << 48);
    let available = RINGS + 0x1000;
    let _ = put(view, available, (number + 1) << 16 | number << 32 | number << 48);
}

fn put(view: &View, at: u64, value: u64) -> Option<()> {
    memory::write(view, at, &value.to_le_bytes())
}
