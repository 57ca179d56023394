//! A network card on a subnet: frames go through rings in shared memory to other machines of the same user
//! ([`mercury_subnet`]). The card leaves checksums and the division of long segments undone: the frame never
//! leaves the host's memory, and the receiver's driver takes it as it is.

use std::{
    collections::VecDeque,
    ffi::OsString,
    fmt,
    io::{self, Read},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::{Command, Stdio},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use mercury_hosted_options::net::{Mac, SubnetName};
use mercury_subnet::{
    Address, member,
    offload::{Accepted, Offload},
    place::Folder,
    port::{self, Membership, PATIENCE, Port, Sent},
};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{GuestAddress, GuestMemoryBackend, VolatileSlice};

use crate::{
    bell::Bell,
    error::{Error, Result},
    memory::{self, View},
    signals::{Waker, start_thread},
    state::{Reader, Writer},
    virtio::{Device, EVENT_POSITIONS, Ring},
};

/// The longest packet, which fits into the longest frame.
const MTU: u16 = 65521;
/// The largest number of frames that are received at once. After that the guest has a turn.
const TURN: usize = 512;

/// Features (virtio 1.2, 5.1.3).
mod feature {
    pub const CHECKSUM: u64 = 1 << 0;
    pub const GUEST_CHECKSUM: u64 = 1 << 1;
    pub const MTU: u64 = 1 << 3;
    pub const MAC: u64 = 1 << 5;
    pub const GUEST_TCP4: u64 = 1 << 7;
    pub const GUEST_TCP6: u64 = 1 << 8;
    pub const TCP4: u64 = 1 << 11;
    pub const TCP6: u64 = 1 << 12;
    /// A frame may be received in several buffers.
    pub const MERGED: u64 = 1 << 15;
    pub const STATUS: u64 = 1 << 16;
}

/// Before each frame: the offload's fields, and the number of buffers.
const HEADER: usize = Offload::SIZE + 2;

/// The options of a card on a subnet.
#[derive(Clone, Debug)]
pub struct SubnetOption {
    pub name: SubnetName,
    /// The card's address, unless the default will do.
    pub mac: Option<Mac>,
    /// True if the card of a machine that was saved may have had another address.
    pub is_copy: bool,
}

/// A place on a subnet.
#[derive(Debug)]
pub struct Joined {
    membership: Membership,
    is_copy: bool,
}

impl SubnetOption {
    /// Takes a place on the subnet. If there is no such subnet, this program is started again with these
    /// words, to keep it.
    ///
    /// # Errors
    /// If the subnet has no place, or cannot be made.
    pub fn join(&self, keeper: &[OsString]) -> Result<Joined> {
        let refused = |error: member::Error| {
            let plain = Error::host(error.message());
            match error.remedy() {
                Some(hint) => plain.hint(hint),
                None => plain,
            }
        };
        let mac = self.mac.map(|mac| mac.0);
        let joined = member::join(&Folder::own(), &self.name, mac, || start_keeper(keeper));
        joined.map(|membership| Joined { membership, is_copy: self.is_copy }).map_err(refused)
    }
}

impl Joined {
    /// Makes the card. From now on the waker is called when frames have come.
    ///
    /// # Errors
    /// If there can be no thread, or no memory.
    pub fn start(self, waker: Waker) -> Result<SubnetCard> {
        let Self { membership, is_copy } = self;
        let mac = Mac(membership.address);
        let wrong = |error: io::Error| Error::host(format!("cannot map the rings of a subnet: {error}"));
        let port = Port::new(membership).map_err(|error| wrong(error.into()))?;
        let bell = port.bell().try_clone_to_owned().map_err(wrong)?;
        let shared = Arc::new(Shared { waits: false.into(), ended: false.into(), own: Bell::new()? });
        let listening = Listening { bell, shared: Arc::clone(&shared), waker: Arc::clone(&waker) };
        let wrong = |error: io::Error| Error::thread("the network", &error);
        start_thread("subnet", move || listening.listen()).map_err(wrong)?;
        let (plain, rooms, parts) = Default::default();
        Ok(SubnetCard { port, mac, is_copy, shared, waker, plain, rooms, parts })
    }
}

/// Starts this program again with these words, as the keeper of a subnet or a region. It is ready when this
/// function returns, and no child of this process.
///
/// # Errors
/// What the keeper has said.
pub fn start_keeper(words: &[OsString]) -> io::Result<()> {
    let mut command = Command::new("/proc/self/exe");
    command.args(words).current_dir("/").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    // SAFETY: All are system calls that take numbers, which a new process may make.
    unsafe {
        command.pre_exec(|| {
            // The monitor may have switched off the randomness of addresses.
            libc::personality(0);
            // The end of a terminal is not the subnet's end.
            libc::setsid();
            match libc::fork() {
                0 => Ok(()),
                -1 => Err(io::Error::last_os_error()),
                _ => libc::_exit(0),
            }
        });
    }
    let mut child = command.spawn()?;
    let mut said = String::new();
    let heard = child.stdout.take().map(|mut output| output.read_to_string(&mut said));
    child.wait()?;
    heard.transpose()?;
    if said.is_empty() { Ok(()) } else { Err(io::Error::other(said)) }
}

#[derive(Debug)]
struct Shared {
    /// True while a frame waits until its receiver has room.
    waits: AtomicBool,
    ended: AtomicBool,
    /// Rings when one of the above has changed.
    own: Bell,
}

/// The thread that waits for the card's bell.
struct Listening {
    bell: OwnedFd,
    shared: Arc<Shared>,
    waker: Waker,
}

impl Listening {
    fn listen(self) {
        while !self.shared.ended.load(Ordering::Acquire) {
            let [rings, has_changed] = self.wait();
            if has_changed {
                self.shared.own.silence();
            }
            if rings {
                port::silence(&self.bell);
            }
            if rings || !has_changed {
                (self.waker)();
            }
        }
    }

    /// Waits for the two bells, or until a waiting frame is out of patience.
    fn wait(&self) -> [bool; 2] {
        let limit = libc::timespec { tv_sec: 0, tv_nsec: i64::from(PATIENCE.subsec_nanos()) };
        let waits = self.shared.waits.load(Ordering::Acquire);
        let limit = if waits { &raw const limit } else { ptr::null() };
        let mut polled = [self.bell.as_raw_fd(), self.shared.own.as_raw_fd()].map(|fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        });
        // SAFETY: There are two, and the limit is a time or none.
        unsafe { libc::ppoll(polled.as_mut_ptr(), 2, limit, ptr::null()) };
        polled.map(|one| one.revents != 0)
    }
}

/// The card.
pub struct SubnetCard {
    port: Port,
    mac: Mac,
    is_copy: bool,
    shared: Arc<Shared>,
    waker: Waker,
    /// Frames that were completed for a driver which does not do that.
    plain: VecDeque<Vec<u8>>,
    rooms: Rooms,
    parts: Parts,
}

impl fmt::Debug for SubnetCard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SubnetCard").field("mac", &self.mac).finish_non_exhaustive()
    }
}

/// What the driver has accepted.
#[derive(Clone, Copy)]
struct Driver {
    offloads: Accepted,
    merges: bool,
}

impl Driver {
    fn new(accepted: u64) -> Self {
        let has = |bit| accepted & bit != 0;
        let offloads = Accepted {
            checksums: has(feature::GUEST_CHECKSUM),
            tcp4: has(feature::GUEST_TCP4),
            tcp6: has(feature::GUEST_TCP6),
        };
        Self { offloads, merges: has(feature::MERGED) }
    }
}

/// The reason for which receiving has stopped.
enum Stopped {
    /// There is no frame.
    Empty,
    /// The driver has no buffers.
    NoBuffers,
    /// It was enough for one turn.
    Enough,
}

impl SubnetCard {
    /// Receives frames, and has the other machines ring when there are new ones.
    fn receive(&mut self, ring: &mut Ring<'_>, memory: &View, driver: Driver) {
        let mut left = TURN;
        loop {
            match self.receive_all(ring, memory, driver, &mut left) {
                Stopped::Empty if self.port.sleep() => return,
                Stopped::Empty => {}
                // The driver notifies the card when it has some.
                Stopped::NoBuffers => return,
                Stopped::Enough => return (self.waker)(),
            }
        }
    }

    fn receive_all(
        &mut self,
        ring: &mut Ring<'_>,
        memory: &View,
        driver: Driver,
        left: &mut usize,
    ) -> Stopped {
        loop {
            let Some(next) = left.checked_sub(1) else { return Stopped::Enough };
            *left = next;
            if let Some(frame) = self.plain.front_mut() {
                let bytes = VolatileSlice::from(&mut frame[..]);
                if !self.rooms.deliver(&bytes, Offload::default(), ring, memory, driver.merges) {
                    return Stopped::NoBuffers;
                }
                self.plain.pop_front();
                continue;
            }
            let Some(slot) = self.port.choose() else { return Stopped::Empty };
            let Some(frame) = self.port.frame(slot) else { return Stopped::Empty };
            if !frame.offload.suits(driver.offloads) {
                let mut bytes = vec![0; frame.bytes.len()];
                frame.bytes.copy_to(&mut bytes[..]);
                self.plain.extend(frame.offload.complete(bytes));
            } else if !self.rooms.deliver(&frame.bytes, frame.offload, ring, memory, driver.merges) {
                return Stopped::NoBuffers;
            }
            self.port.release(slot);
        }
    }

    fn transmit(&mut self, ring: &mut Ring<'_>, memory: &View) {
        while let Some(chain) = ring.pop_or_await() {
            let head = chain.head_index();
            self.parts.collect(chain.readable(), memory);
            if self.send(memory) == Sent::Later {
                ring.put_back(1);
                break;
            }
            ring.used(head, 0);
        }
        let waits = self.port.waits();
        if self.shared.waits.swap(waits, Ordering::AcqRel) != waits && waits {
            self.shared.own.ring();
        }
    }

    /// Sends the frame of the collected parts, if it is one.
    fn send(&mut self, memory: &View) -> Sent {
        let Some(length) = self.parts.length.checked_sub(HEADER) else { return Sent::Done };
        let mut header = [0; Offload::SIZE];
        let mut to: Address = [0; 6];
        self.parts.copy(0, &VolatileSlice::from(&mut header[..]), memory);
        self.parts.copy(HEADER, &VolatileSlice::from(&mut to[..]), memory);
        let Some(offload) = Offload::from_bytes(header).checked(length) else { return Sent::Done };
        let parts = &self.parts;
        self.port.send(to, length, offload, |place| parts.copy(HEADER, place, memory))
    }
}

/// The memory of a buffer that the guest sends, as far as it is there.
#[derive(Debug, Default)]
struct Parts {
    parts: Vec<(u64, usize)>,
    length: usize,
}

impl Parts {
    /// Takes the parts of a chain. If one is no memory, there are none.
    fn collect(&mut self, parts: impl Iterator<Item = Descriptor>, memory: &View) {
        self.parts.clear();
        self.length = 0;
        for part in parts {
            if !memory::contains(memory, part.addr().0, part.len().into()) {
                self.parts.clear();
                self.length = 0;
                return;
            }
            self.length += part.len() as usize;
            self.parts.push((part.addr().0, part.len() as usize));
        }
    }

    /// Copies bytes from an offset on, as many as there is place for.
    fn copy(&self, mut skip: usize, to: &VolatileSlice<'_>, memory: &View) {
        let mut done = 0;
        for &(at, length) in &self.parts {
            let skipped = skip.min(length);
            skip -= skipped;
            let count = (length - skipped).min(to.len() - done);
            let from = memory.get_slice(GuestAddress(at + skipped as u64), count);
            if let (Ok(from), Ok(place)) = (from, to.subslice(done, count)) {
                from.copy_to_volatile_slice(place);
            }
            done += count;
        }
    }
}

/// Buffers for receiving.
#[derive(Debug, Default)]
struct Rooms {
    /// For each buffer its first descriptor, and its length.
    buffers: Vec<(u16, usize)>,
    /// The memory of the buffers.
    parts: Vec<(u64, usize)>,
}

impl Rooms {
    /// Gives the guest a frame. Returns false if it has no buffers for it. A frame that is too long for its
    /// buffers is lost.
    fn deliver(
        &mut self,
        frame: &VolatileSlice<'_>,
        offload: Offload,
        ring: &mut Ring<'_>,
        memory: &View,
        merges: bool,
    ) -> bool {
        let needed = HEADER + frame.len();
        if !self.collect(needed, ring, memory, merges) {
            ring.put_back(self.buffers.len());
            return false;
        }
        if self.buffers.iter().map(|buffer| buffer.1).sum::<usize>() < needed {
            ring.put_back(self.buffers.len());
            return true;
        }
        let mut header = [0; HEADER];
        header[..Offload::SIZE].copy_from_slice(&offload.to_bytes());
        header[Offload::SIZE..].copy_from_slice(&(self.buffers.len() as u16).to_le_bytes());
        self.fill(&VolatileSlice::from(&mut header[..]), frame, memory);
        let mut left = needed;
        for &(head, length) in &self.buffers {
            let written = length.min(left);
            left -= written;
            ring.used(head, written as u32);
        }
        true
    }

    /// Takes buffers for so many bytes, or one if the driver does not merge several. Returns false if the
    /// driver has too few.
    fn collect(&mut self, needed: usize, ring: &mut Ring<'_>, memory: &View, merges: bool) -> bool {
        self.buffers.clear();
        self.parts.clear();
        let mut length = 0;
        while length < needed && (merges || self.buffers.is_empty()) {
            let Some(chain) = ring.pop_or_await() else { return false };
            let head = chain.head_index();
            let parts = chain.writable().map(|part| (part.addr().0, part.len() as usize));
            let first = self.parts.len();
            self.parts.extend(parts.filter(|part| memory::contains(memory, part.0, part.1 as u64)));
            let own = self.parts[first..].iter().map(|part| part.1).sum();
            self.buffers.push((head, own));
            length += own;
        }
        true
    }

    /// Writes a header and a frame into the buffers' memory.
    fn fill(&self, header: &VolatileSlice<'_>, frame: &VolatileSlice<'_>, memory: &View) {
        let mut sources = [*header, *frame];
        let mut source = 0;
        for &(mut at, mut length) in &self.parts {
            while length > 0 && source < sources.len() {
                let from = sources[source];
                let count = from.len().min(length);
                // The parts were checked when the buffers came.
                if let Ok(place) = memory.get_slice(GuestAddress(at), count) {
                    from.copy_to_volatile_slice(place);
                }
                (at, length) = (at + count as u64, length - count);
                match from.offset(count) {
                    Ok(rest) if !rest.is_empty() => sources[source] = rest,
                    _ => source += 1,
                }
            }
        }
    }
}

impl Device for SubnetCard {
    fn number(&self) -> u32 {
        1
    }

    fn queues(&self) -> usize {
        2
    }

    fn features(&self) -> u64 {
        use feature::{
            CHECKSUM, GUEST_CHECKSUM, GUEST_TCP4, GUEST_TCP6, MAC, MERGED, MTU, STATUS, TCP4, TCP6,
        };
        let offloads = CHECKSUM | GUEST_CHECKSUM | GUEST_TCP4 | GUEST_TCP6 | TCP4 | TCP6;
        offloads | MTU | MAC | MERGED | STATUS | EVENT_POSITIONS
    }

    fn configuration(&self) -> Vec<u8> {
        let (is_up, pairs) = (1_u16, 1_u16);
        [&self.mac.0[..], &is_up.to_le_bytes(), &pairs.to_le_bytes(), &MTU.to_le_bytes()].concat()
    }

    /// The address is a state: a copy of a machine has another one.
    fn identity(&self) -> Vec<u8> {
        self.configuration().split_off(self.mac.0.len())
    }

    fn save(&self, to: &mut Writer) {
        to.bytes(&self.mac.0);
    }

    fn load(&mut self, from: &mut Reader<'_>) -> Result<()> {
        let saved = from.bytes()?;
        if saved == self.mac.0 || self.is_copy && saved.len() == self.mac.0.len() {
            return Ok(());
        }
        Err(Error::new("the card of the saved machine has another address on its subnet")
            .hint("give the machine the --mac that it had"))
    }

    fn work(&mut self, rings: &mut [Ring<'_>], memory: &View, accepted: u64) -> bool {
        let [receiving, sending] = rings else { return false };
        self.receive(receiving, memory, Driver::new(accepted));
        self.transmit(sending, memory);
        false
    }

    fn reset(&mut self) {
        self.plain.clear();
    }
}

impl Drop for SubnetCard {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Release);
        self.shared.own.ring();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{
        sync::mpsc,
        thread,
        time::{Duration, Instant},
    };

    use mercury_subnet::keeper::Keeper;
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{self, BUFFERS, Driver as Guest, with_driver};

    const PLAIN: u64 = 1 << 32 | feature::MERGED;
    const ALL: u64 = PLAIN
        | feature::CHECKSUM
        | feature::GUEST_CHECKSUM
        | feature::GUEST_TCP4
        | feature::GUEST_TCP6
        | feature::TCP4
        | feature::TCP6;
    const LIMIT: Duration = Duration::from_secs(20);
    const ANYONE: Address = [0xFF; 6];
    /// The offset among the buffers at which another region of the tests' memory begins.
    const BORDER: usize = 0x8000;

    /// Makes cards on a subnet of their own, whose keeper is a thread.
    fn cards(count: usize) -> (Vec<SubnetCard>, tempfile::TempDir) {
        let directory = tempfile::tempdir().unwrap();
        let folder = Folder::at(&directory.path().join("subnets"));
        let name: SubnetName = "test".parse().unwrap();
        let join = |_| {
            let start = || {
                let (folder, name) = (folder.clone(), name.clone());
                let (ready, is_ready) = mpsc::channel();
                thread::spawn(move || {
                    let address = |slot: usize| [2, 0, 0, 0, 0, slot as u8];
                    let keeper = Keeper::start(&folder, &name, &address).unwrap();
                    ready.send(()).unwrap();
                    keeper.serve().unwrap();
                });
                is_ready.recv().map_err(io::Error::other)
            };
            let membership = member::join(&folder, &name, None, start).unwrap();
            Joined { membership, is_copy: false }.start(testing::waker()).unwrap()
        };
        ((0..count).map(join).collect(), directory)
    }

    /// Gives a test two drivers on one subnet.
    fn with_two(accepted: [u64; 2], test: impl FnOnce(&mut Guest<'_>, &mut Guest<'_>)) {
        let (mut cards, _directory) = cards(2);
        let (second, first) = (cards.pop().unwrap(), cards.pop().unwrap());
        with_driver(first, |first| {
            with_driver(second, |second| {
                first.begin(accepted[0], 2);
                second.begin(accepted[1], 2);
                test(first, second);
            });
        });
    }

    /// Sends a frame with its header, from two parts of memory.
    fn send(guest: &mut Guest<'_>, header: &[u8], frame: &[u8]) {
        let all = [header, &[0; 2], frame].concat();
        guest.put(BUFFERS, &all).unwrap();
        let rest = all.len() - 20;
        let (second, third) = (rest.min(BORDER - 20), rest.saturating_sub(BORDER - 20));
        let parts = [
            (BUFFERS, 20, false),
            (BUFFERS + 20, second as u32, false),
            (BUFFERS + BORDER as u64, third as u32, false),
        ];
        guest.offer(1, 0, if third > 0 { &parts } else { &parts[..2] });
        guest.notify(1);
    }

    /// Makes a TCP segment by IPv4, as a driver sends it, and the header before it.
    fn segment(to: Address, length: usize) -> ([u8; 10], Vec<u8>) {
        let mut frame = [&to[..], &[2, 0, 0, 0, 0, 9, 8, 0, 0x45, 0]].concat();
        frame.extend((length as u16 + 40).to_be_bytes());
        frame.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend([0, 9, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
        frame.extend((0..length).map(|at| (at % 251) as u8));
        let mut header = [1, 1, 54, 0, 0, 0, 34, 0, 16, 0];
        header[4..6].copy_from_slice(&1400_u16.to_le_bytes());
        (header, frame)
    }

    #[test]
    fn a_long_segment_arrives_as_it_was_sent() {
        with_two([ALL, ALL], |first, second| {
            second.offer(0, 0, &[(BUFFERS, BORDER as u32, true)]);
            second.offer(0, 1, &[(BUFFERS + BORDER as u64, 40_000, true)]);
            let (header, frame) = segment(ANYONE, 60_000);
            send(first, &header, &frame);
            assert_eq!(first.used(1), [(0, 0)]);
            second.poll();
            assert_eq!(second.used(0), [(0, 32_768), (1, 60_054 + 12 - 32_768)]);
            assert_eq!(second.bytes(BUFFERS, 12), [&header[..], &[2, 0]].concat());
            assert!(second.bytes(BUFFERS + 12, frame.len()) == frame);
        });
    }

    #[test]
    fn a_driver_without_offloads_gets_short_segments_with_checksums() {
        with_two([ALL, PLAIN], |first, second| {
            for head in 0..3 {
                second.offer(0, head, &[(BUFFERS + u64::from(head) * 2000, 2000, true)]);
            }
            let (header, frame) = segment(ANYONE, 3000);
            send(first, &header, &frame);
            second.poll();
            let used = second.used(0);
            assert_eq!(used, [(0, 1466), (1, 1466), (2, 266)]);
            let mut payload: Vec<u8> = Vec::new();
            for (head, length) in used {
                let bytes = second.bytes(BUFFERS + u64::from(head) * 2000, length as usize);
                assert_eq!(bytes[..12], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
                assert_ne!(bytes[12 + 50..12 + 52], [0, 0]);
                payload.extend(&bytes[12 + 54..]);
            }
            assert!(payload == frame[54..]);
        });
    }

    #[test]
    fn frames_that_come_before_there_is_a_buffer_are_kept_in_their_order() {
        with_two([ALL, PLAIN], |first, second| {
            let frames: Vec<_> = (1..4).map(|number| segment(ANYONE, 100 * number).1).collect();
            for frame in &frames {
                send(first, &[0; 10], frame);
                assert_eq!(first.used(1), [(0, 0)]);
            }
            second.poll();
            assert_eq!(second.used(0), []);
            for (head, frame) in frames.iter().enumerate() {
                second.offer(0, head as u16, &[(BUFFERS, 1000, true)]);
                second.notify(0);
                assert_eq!(second.used(0), [(head as u32, frame.len() as u32 + 12)]);
                assert!(second.bytes(BUFFERS + 12, frame.len()) == *frame);
            }
        });
    }

    /// Sends more than a ring holds: the sender's buffer comes back when the receiver has read.
    #[test]
    fn frames_wait_for_a_receiver_that_is_slow_and_none_is_lost() {
        with_two([ALL, ALL], |first, second| {
            // The sender learns where the receiver is.
            first.offer(0, 0, &[(BUFFERS + 0x2_0000, 2000, true)]);
            let mut hello = segment(ANYONE, 10).1;
            hello[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
            send(second, &[0; 10], &hello);
            first.poll();
            assert_eq!(first.used(0).len(), 1);
            let mut was_full = false;
            for number in 0..60 {
                let (header, mut frame) = segment([2, 0, 0, 0, 0, 1], 50_000);
                frame[60] = number;
                second.used(1);
                send(first, &header, &frame);
                let start = Instant::now();
                while first.used(1).is_empty() {
                    was_full = true;
                    assert!(start.elapsed() < LIMIT, "it does not go on");
                    read(second);
                    first.poll();
                }
            }
            assert!(was_full);
            let mut left = 0;
            while read(second) {
                left += 1;
            }
            assert!(left > 0);
        });
        // Numbers of frames that were read, in this thread.
        assert_eq!(READ.with_borrow(Clone::clone), (0..60).collect::<Vec<u8>>());
    }

    thread_local! {
        static READ: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
    }

    /// Receives one frame, and notes its number. Returns false if there is none.
    fn read(guest: &mut Guest<'_>) -> bool {
        guest.offer(0, 0, &[(BUFFERS, BORDER as u32, true), (BUFFERS + BORDER as u64, 40_000, true)]);
        guest.notify(0);
        let is_there = !guest.used(0).is_empty();
        if is_there {
            READ.with_borrow_mut(|all| all.push(guest.bytes(BUFFERS + 12 + 60, 1)[0]));
        }
        is_there
    }

    /// With positions, a driver is interrupted at the buffer that it names, and notifies at the one that the
    /// card names. The card names the next one only when it has no more: also after a frame found too few
    /// buffers.
    #[test]
    fn positions_say_when_the_other_side_is_told() {
        /// The queues' rings in the tests' memory, and in them the other side's position.
        const RINGS: [u64; 2] = [0x1000, 0x4000];
        const INTERRUPT_AT: u64 = 0x1014;
        const NOTIFY_AT: u64 = 0x2044;
        with_two([ALL | EVENT_POSITIONS; 2], |first, second| {
            first.write(0x70, 15);
            second.write(0x70, 15);
            let notify_at = |guest: &Guest<'_>, queue: usize| guest.bytes(RINGS[queue] + NOTIFY_AT, 2)[0];
            first.put(RINGS[1] + INTERRUPT_AT, &[1, 0]).unwrap();
            let frame = segment(ANYONE, 3000).1;
            for (number, is_told) in [(1, false), (2, true), (3, false)] {
                first.put(BUFFERS, &[&[0; 12][..], &frame].concat()).unwrap();
                first.offer(1, 0, &[(BUFFERS, 12 + frame.len() as u32, false)]);
                assert_eq!(first.notify(1), is_told, "{number}");
                assert_eq!((first.used(1).len(), notify_at(first, 1)), (1, number));
            }
            for number in 1..=2 {
                second.offer(0, number, &[(BUFFERS, 1000, true)]);
                assert!(!second.poll());
                assert_eq!((second.used(0).len(), notify_at(second, 0)), (0, number as u8));
            }
            second.offer(0, 3, &[(BUFFERS, 2000, true)]);
            assert!(second.poll());
            assert_eq!(second.used(0).len(), 3);
        });
    }

    #[test]
    fn a_frame_that_is_none_is_not_sent() {
        with_two([ALL, ALL], |first, second| {
            second.offer(0, 0, &[(BUFFERS, 2000, true)]);
            let (header, frame) = segment(ANYONE, 100);
            first.put(BUFFERS, &[&header[..], &[0; 2], &frame].concat()).unwrap();
            let outside = [0xFF; 10];
            for parts in [
                &[(BUFFERS, 5, false)][..],
                &[(BUFFERS, 20, false)],
                &[(BUFFERS, 60_000, false), (BUFFERS, 60_000, false)],
                &[(u64::MAX - 5, 100, false)],
                &[(BUFFERS, 12, false), (0xF_FFF0, 100, false)],
            ] {
                first.offer(1, 0, parts);
                first.notify(1);
                assert_eq!(first.used(1), [(0, 0)]);
            }
            send(first, &outside, &frame);
            assert_eq!(first.used(1), [(0, 0)]);
            second.poll();
            assert_eq!(second.used(0), []);
            send(first, &header, &frame);
            second.poll();
            assert_eq!(second.used(0), [(0, 12 + frame.len() as u32)]);
        });
    }

    #[test]
    fn the_configuration_has_the_address_and_no_short_packets() {
        let (mut cards, _directory) = cards(1);
        with_driver(cards.pop().unwrap(), |guest| {
            guest.begin(ALL, 2);
            assert_eq!(guest.transport.read(0x100, 4), 0x0000_0002);
            assert_eq!((guest.transport.read(0x106, 2), guest.transport.read(0x10A, 2)), (1, u64::from(MTU)));
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn no_driver_makes_it_panic(all in testing::anything()) {
            let (mut cards, _directory) = cards(1);
            with_driver(cards.pop().unwrap(), |driver| testing::torture(driver, all));
        }

        #[test]
        fn no_chain_makes_it_panic(chains in testing::chains()) {
            let (mut cards, _directory) = cards(2);
            let (second, first) = (cards.pop().unwrap(), cards.pop().unwrap());
            with_driver(second, |second| {
                second.begin(ALL, 2);
                send(second, &[0; 10], &segment(ANYONE, 1000).1);
                with_driver(first, |driver| testing::give_chains(driver, 2, &chains));
            });
        }
    }
}
