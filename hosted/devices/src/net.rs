//! A network card (virtio 1.2, 5.1) on a [`Link`]. It computes no checksums and splits nothing.
//! Frames are as long as the link's.

use mercury_hosted_options::net::Mac;
use virtio_queue::desc::split::Descriptor;

use crate::{
    link::{self, Link},
    memory::{self, View},
    virtio::{Device, Ring},
};

const FEATURE_MTU: u64 = 1 << 3;
const FEATURE_MAC: u64 = 1 << 5;
/// A frame may be received in several buffers.
const FEATURE_MERGED: u64 = 1 << 15;
const FEATURE_STATUS: u64 = 1 << 16;
/// Before each frame: of its fields only the last is used, the number of buffers.
const HEADER: usize = 12;

/// Sees each frame that the guest sends, without delaying it.
pub type Witness = Box<dyn Fn(&[u8]) + Send>;

pub struct Net {
    link: Link,
    mac: Mac,
    mtu: u16,
    is_up: bool,
    /// Received, and without a buffer yet.
    waiting: Option<Vec<u8>>,
    witness: Option<Witness>,
}

impl std::fmt::Debug for Net {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Net").field("link", &self.link).field("mac", &self.mac).finish_non_exhaustive()
    }
}

/// A buffer for receiving: its first descriptor, and the memory of it that is there.
struct Room {
    head: u16,
    parts: Vec<(u64, usize)>,
    length: usize,
}

impl Room {
    fn new(head: u16, parts: impl Iterator<Item = Descriptor>, memory: &View) -> Self {
        let parts = parts.filter(|part| memory::contains(memory, part.addr().0, part.len().into()));
        let parts: Vec<_> = parts.map(|part| (part.addr().0, part.len() as usize)).collect();
        let length = parts.iter().map(|part| part.1).sum();
        Self { head, parts, length }
    }

    /// Fills it with the beginning of some bytes. Says how many.
    fn fill(&self, mut bytes: &[u8], memory: &View) -> usize {
        let all = bytes.len();
        for &(at, length) in &self.parts {
            let (now, later) = bytes.split_at(length.min(bytes.len()));
            // It was checked when the buffer came.
            let _ = memory::write(memory, at, now);
            bytes = later;
        }
        all - bytes.len()
    }
}

impl Net {
    /// Makes a card. `mtu` is the longest packet that its network takes.
    #[must_use]
    pub fn new(link: Link, mac: Mac, mtu: u16) -> Self {
        Self { link, mac, mtu, is_up: true, waiting: None, witness: None }
    }

    /// Shows the witness each frame that the guest sends.
    #[must_use]
    pub fn witnessed(self, witness: Option<Witness>) -> Self {
        Self { witness, ..self }
    }

    fn receive(&mut self, ring: &mut Ring<'_>, memory: &View, merged: bool) {
        while let Some(frame) = self.waiting.take().or_else(|| self.link.take()) {
            if !deliver(&frame, ring, memory, merged) {
                self.waiting = Some(frame);
                return;
            }
        }
    }

    fn transmit(&mut self, ring: &mut Ring<'_>, memory: &View) {
        while self.link.flush() {
            let Some(chain) = ring.pop() else { return };
            let head = chain.head_index();
            let frame = self.link.begin();
            let start = frame.len();
            if gather(frame, chain.readable(), memory).is_none() {
                frame.clear();
            } else if let Some(witness) = &self.witness {
                witness(&frame[start..]);
            }
            self.link.send();
            ring.used(head, 0);
        }
    }
}

/// Gives the guest a frame. Says whether it had buffers for it. One that is too long for its buffers is lost.
fn deliver(frame: &[u8], ring: &mut Ring<'_>, memory: &View, merged: bool) -> bool {
    let mut rooms: Vec<Room> = Vec::new();
    let mut length = 0;
    while length < HEADER + frame.len() {
        if !merged && !rooms.is_empty() {
            ring.put_back(rooms.len());
            return true;
        }
        let Some(chain) = ring.pop() else {
            ring.put_back(rooms.len());
            return false;
        };
        let room = Room::new(chain.head_index(), chain.writable(), memory);
        length += room.length;
        rooms.push(room);
    }
    let mut bytes = vec![0; HEADER - 2];
    bytes.extend((rooms.len() as u16).to_le_bytes());
    bytes.extend(frame);
    let mut left = &bytes[..];
    for room in rooms {
        let written = room.fill(left, memory);
        left = &left[written..];
        ring.used(room.head, written as u32);
    }
    true
}

/// Appends a frame that the guest sends, without its header. Returns nothing if it is no frame.
fn gather(frame: &mut Vec<u8>, parts: impl Iterator<Item = Descriptor>, memory: &View) -> Option<()> {
    let mut header = HEADER;
    for part in parts {
        let skipped = header.min(part.len() as usize);
        header -= skipped;
        let (at, length) = (part.addr().0.checked_add(skipped as u64)?, part.len() as usize - skipped);
        if !memory::contains(memory, part.addr().0, part.len().into())
            || frame.len() + length > link::LONGEST + 4
        {
            return None;
        }
        let start = frame.len();
        frame.resize(start + length, 0);
        memory::read(memory, at, &mut frame[start..]).or((length == 0).then_some(()))?;
    }
    Some(())
}

impl Device for Net {
    fn number(&self) -> u32 {
        1
    }

    fn queues(&self) -> usize {
        2
    }

    fn features(&self) -> u64 {
        FEATURE_MTU | FEATURE_MAC | FEATURE_MERGED | FEATURE_STATUS
    }

    fn configuration(&self) -> Vec<u8> {
        let (is_up, pairs) = (u16::from(self.is_up), 1_u16);
        [&self.mac.0[..], &is_up.to_le_bytes(), &pairs.to_le_bytes(), &self.mtu.to_le_bytes()].concat()
    }

    fn work(&mut self, rings: &mut [Ring<'_>], memory: &View, accepted: u64) -> bool {
        let [receiving, sending] = rings else { return false };
        self.receive(receiving, memory, accepted & FEATURE_MERGED != 0);
        self.transmit(sending, memory);
        std::mem::replace(&mut self.is_up, !self.link.has_ended()) != self.is_up
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{
        io::{Read, Write},
        os::unix::net::UnixStream,
        time::{Duration, Instant},
    };

    use super::*;
    use crate::{
        link::Framing,
        testing::{self, BUFFERS, Driver, with_driver},
    };
    use proptest::prelude::*;

    const MAC: Mac = Mac([2, 1, 2, 3, 4, 5]);
    const ACCEPTED: u64 = 1 << 32 | FEATURE_MERGED;
    const PATIENCE: Duration = Duration::from_secs(20);

    /// Makes a card, and the other end of its cable.
    fn card() -> (Net, UnixStream) {
        let (ours, others) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (Net::new(Link::start(ours.into(), Framing::Stream, testing::waker()).unwrap(), MAC, 1500), others)
    }

    fn frame(length: usize, seed: usize) -> Vec<u8> {
        (0..length).map(|at| (at * 7 + seed) as u8).collect()
    }

    fn send(cable: &mut UnixStream, frame: &[u8]) {
        cable.write_all(&(frame.len() as u32).to_be_bytes()).unwrap();
        cable.write_all(frame).unwrap();
    }

    fn receive(cable: &mut UnixStream) -> Vec<u8> {
        let mut prefix = [0; 4];
        cable.read_exact(&mut prefix).unwrap();
        let mut frame = vec![0; u32::from_be_bytes(prefix) as usize];
        cable.read_exact(&mut frame).unwrap();
        frame
    }

    fn poll_until_used(driver: &mut Driver<'_>, queue: usize) -> Vec<(u32, u32)> {
        let start = Instant::now();
        loop {
            driver.poll();
            let used = driver.used(queue);
            if !used.is_empty() {
                return used;
            }
            assert!(start.elapsed() < PATIENCE, "nothing was used");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn frames_that_come_before_there_is_a_buffer_are_kept_in_their_order() {
        let (card, mut cable) = card();
        with_driver(card, |driver| {
            driver.begin(ACCEPTED, 2);
            for seed in 0..3 {
                send(&mut cable, &frame(60, seed));
            }
            std::thread::sleep(Duration::from_millis(20));
            driver.poll();
            assert_eq!(driver.used(0), []);
            for seed in 0..3_u16 {
                let at = BUFFERS + u64::from(seed) * 0x1000;
                driver.offer(0, seed, &[(at, 200, true)]);
                driver.notify(0);
                assert_eq!(poll_until_used(driver, 0), [(seed.into(), 72)]);
                assert_eq!(driver.bytes(at + 12, 60), frame(60, seed.into()));
                assert_eq!(driver.bytes(at, 12), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
            }
        });
    }

    #[test]
    fn a_long_frame_comes_in_several_buffers_all_at_once() {
        let (card, mut cable) = card();
        with_driver(card, |driver| {
            driver.begin(ACCEPTED, 2);
            driver.offer(0, 0, &[(BUFFERS, 100, true)]);
            send(&mut cable, &frame(250, 1));
            std::thread::sleep(Duration::from_millis(20));
            driver.poll();
            assert_eq!(driver.used(0), []);
            driver.offer(0, 1, &[(BUFFERS + 100, 50, true), (BUFFERS + 150, 50, true)]);
            driver.offer(0, 3, &[(BUFFERS + 200, 100, true)]);
            driver.offer(0, 4, &[(BUFFERS + 300, 100, true)]);
            driver.notify(0);
            assert_eq!(poll_until_used(driver, 0), [(0, 100), (1, 100), (3, 62)]);
            assert_eq!(driver.bytes(BUFFERS + 10, 2), [3, 0]);
            assert_eq!(driver.bytes(BUFFERS + 12, 250), frame(250, 1));
        });
    }

    #[test]
    fn a_frame_that_no_buffer_is_long_enough_for_is_lost_and_the_next_one_is_not() {
        let (card, mut cable) = card();
        with_driver(card, |driver| {
            driver.begin(1 << 32, 2);
            driver.offer(0, 0, &[(BUFFERS, 100, true)]);
            send(&mut cable, &frame(250, 1));
            send(&mut cable, &frame(50, 2));
            assert_eq!(poll_until_used(driver, 0), [(0, 62)]);
            assert_eq!(driver.bytes(BUFFERS + 12, 50), frame(50, 2));
        });
    }

    #[test]
    fn frames_of_the_guest_wait_for_the_reader() {
        let (card, mut cable) = card();
        with_driver(card, |driver| {
            driver.begin(ACCEPTED, 2);
            let frames: Vec<Vec<u8>> = (0..200).map(|seed| frame(9000, seed)).collect();
            let mut received = Vec::new();
            let start = Instant::now();
            let mut was_full = false;
            for sent in &frames {
                driver.put(BUFFERS + 12, sent).unwrap();
                driver.offer(1, 0, &[(BUFFERS, 12, false), (BUFFERS + 12, 9000, false)]);
                driver.notify(1);
                while driver.used(1).is_empty() {
                    was_full = true;
                    received.push(receive(&mut cable));
                    driver.poll();
                    assert!(start.elapsed() < PATIENCE, "it does not go on");
                }
            }
            assert!(was_full);
            // The end of the last one is sent when there is room for it.
            cable.set_nonblocking(false).unwrap();
            while received.len() < frames.len() {
                received.push(receive(&mut cable));
                driver.poll();
            }
            assert!(received == frames);
        });
    }

    #[test]
    fn a_frame_that_is_none_is_not_sent() {
        let (card, mut cable) = card();
        with_driver(card, |driver| {
            driver.begin(ACCEPTED, 2);
            driver.put(BUFFERS, &[0; 12]).unwrap();
            driver.put(BUFFERS + 12, &frame(60, 3)).unwrap();
            // Too short; too long; not there; without its header; and at last one that is.
            let last = [(BUFFERS, 6, false), (BUFFERS + 6, 66, false)];
            let long = [(BUFFERS, 40_000, false), (BUFFERS, 40_000, false)];
            for parts in [
                &[(BUFFERS, 20, false)][..],
                &long,
                &[(u64::MAX - 5, 100, false)],
                &[(BUFFERS, 3, false)],
                &last,
            ] {
                driver.offer(1, 0, parts);
                driver.notify(1);
                assert_eq!(driver.used(1), [(0, 0)]);
            }
            assert_eq!(receive(&mut cable), frame(60, 3));
        });
    }

    #[test]
    fn the_end_of_the_cable_takes_the_link_down() {
        let (card, cable) = card();
        with_driver(card, |driver| {
            driver.begin(ACCEPTED, 2);
            let status = |driver: &Driver<'_>| driver.transport.read(0x106, 2);
            assert_eq!((driver.transport.read(0x100, 4), status(driver)), (0x0302_0102, 1));
            assert_eq!(driver.transport.read(0x10A, 2), 1500);
            drop(cable);
            let start = Instant::now();
            while !driver.poll() {
                assert!(start.elapsed() < PATIENCE, "the driver is not told");
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!((driver.transport.read(0x60, 4), status(driver)), (2, 0));
            // It sends into the void.
            driver.offer(1, 0, &[(BUFFERS, 100, false)]);
            driver.notify(1);
            assert_eq!(driver.used(1), [(0, 0)]);
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn no_driver_makes_it_panic(all in testing::anything()) {
            let (card, mut cable) = card();
            send(&mut cable, &frame(1000, 1));
            with_driver(card, |driver| testing::torture(driver, all));
        }

        #[test]
        fn no_chain_makes_it_panic(chains in testing::chains()) {
            let (card, mut cable) = card();
            send(&mut cable, &frame(1000, 1));
            with_driver(card, |driver| testing::give_chains(driver, 2, &chains));
        }
    }
}
