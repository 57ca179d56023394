//! A port to an agent in the guest (virtio 1.2, 5.3: a console with several ports, of which this is one).
//!
//! A machine that begins as a copy of another one has the other's name, keys and addresses. The device tells
//! the agent so, by a line of text:
//!
//! ```text
//! clone NUMBER NAME TEMPLATE ID ADDRESS
//! ```
//!
//! The agent makes the copy a machine of its own, and answers `done ID`. Until then the monitor holds what
//! comes from outside ([`Gate`]). Linux shows the port as `/dev/vport*`, with the name [`NAME`] in sysfs.
//! While no program has the port open, nothing is sent, and nothing is held.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use mercury_hosted_options::net::Mac;
use virtio_queue::DescriptorChain;

use crate::{
    error::{Error, Result},
    memory::{self, View},
    state::{Reader, Writer},
    virtio::{Device, Ring},
};

/// The port's name.
pub const NAME: &str = "mercury.agent";

/// The feature: there are ports with names, and messages about them.
const PORTS: u64 = 1 << 1;
/// The queues: to the port, from the port, messages to the driver, messages from it.
const QUEUES: usize = 4;
/// The number of the port.
const PORT: u32 = 0;
/// The kinds of messages (5.3.6.2).
mod event {
    pub const DEVICE_READY: u16 = 0;
    pub const ADD: u16 = 1;
    pub const READY: u16 = 3;
    pub const OPEN: u16 = 6;
    pub const NAME: u16 = 7;
}
/// The length of a message without a name.
const MESSAGE: usize = 8;
/// The longest line of an agent, and the bytes that are read from one buffer.
const LONGEST_LINE: usize = 64;
const MOST_AT_ONCE: u64 = 4096;
/// The largest number of messages that wait for the driver, and the longest message or line.
const MOST_WAITING: usize = 8;
const LONGEST_WAITING: usize = 512;

/// The identity of a machine that begins as a copy of another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// A number that no other machine of the template has.
    pub number: u32,
    pub name: String,
    pub template: String,
    /// A random number.
    pub id: [u8; 16],
}

impl Identity {
    /// Returns an address for the network cards: locally administered, and random.
    #[must_use]
    pub fn address(&self) -> Mac {
        let [a, b, c, d, e, ..] = self.id;
        Mac([2, a, b, c, d, e])
    }

    fn id(&self) -> String {
        self.id.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, name, template, .. } = self;
        write!(f, "clone {number} {name} {template} {} {}", self.id(), self.address())
    }
}

/// Says if the machine may be reached from outside. It is shut while a copy is made a machine of its own.
#[derive(Debug, Default)]
pub struct Gate(AtomicBool);

impl Gate {
    #[must_use]
    pub fn is_shut(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub fn open(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    fn shut(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The device.
#[derive(Debug, Default)]
pub struct Agent {
    /// The identity that the agent is told when the machine goes on.
    identity: Option<Identity>,
    /// The answer that opens the gate.
    awaited: Option<String>,
    gate: Arc<Gate>,
    /// True while a program in the guest has the port open.
    is_open: bool,
    /// Lines for the agent.
    lines: VecDeque<Vec<u8>>,
    /// Messages for the driver.
    messages: VecDeque<Vec<u8>>,
    /// The beginning of the agent's line.
    heard: Vec<u8>,
}

impl Agent {
    /// Makes a device. If the machine begins as a copy of another one, its agent is told this identity.
    #[must_use]
    pub fn new(identity: Option<Identity>) -> Self {
        Self { identity, ..Self::default() }
    }

    /// Returns the gate, which the monitor obeys.
    #[must_use]
    pub fn gate(&self) -> Arc<Gate> {
        Arc::clone(&self.gate)
    }

    /// Returns true if the machine begins as a copy of another one, whose state it has not taken yet.
    #[must_use]
    pub fn is_copy(&self) -> bool {
        self.identity.is_some()
    }

    /// Forgets the program in the guest, if there was one.
    fn close(&mut self) {
        self.is_open = false;
        self.lines.clear();
        self.heard.clear();
        self.awaited = None;
        self.gate.open();
    }

    /// Tells the agent the identity.
    fn tell(&mut self, identity: &Identity) {
        // Lines to the machine from which this one was copied are void.
        self.lines.clear();
        self.lines.push_back(format!("{identity}\n").into_bytes());
        self.awaited = Some(format!("done {}", identity.id()));
        self.gate.shut();
    }

    /// Answers a message of the driver.
    fn obey(&mut self, message: [u8; MESSAGE]) {
        let [_, _, _, _, kind, kind_high, value, value_high] = message;
        let is_set = [value, value_high] != [0, 0];
        match u16::from_le_bytes([kind, kind_high]) {
            event::DEVICE_READY if is_set => self.post(event::ADD, b""),
            event::READY if is_set => {
                self.post(event::NAME, NAME.as_bytes());
                self.post(event::OPEN, b"");
            }
            event::OPEN if is_set => self.is_open = true,
            event::OPEN => self.close(),
            _ => {}
        }
    }

    fn post(&mut self, kind: u16, name: &[u8]) {
        if self.messages.len() < MOST_WAITING {
            let (kind, value) = (kind.to_le_bytes(), 1_u16.to_le_bytes());
            self.messages.push_back([&PORT.to_le_bytes()[..], &kind, &value, name].concat());
        }
    }

    /// Takes what the agent has written.
    fn hear(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if *byte != b'\n' {
                // A line that is too long is none of an agent's.
                if self.heard.len() < LONGEST_LINE {
                    self.heard.push(*byte);
                }
                continue;
            }
            if self.awaited.as_ref().is_some_and(|awaited| awaited.as_bytes() == self.heard.trim_ascii_end())
            {
                self.awaited = None;
                self.gate.open();
            }
            self.heard.clear();
        }
    }
}

/// Returns the beginning of the bytes that the driver has put into a buffer.
fn read(chain: DescriptorChain<&View>, memory: &View) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in chain.readable() {
        let start = bytes.len();
        let length = u64::from(part.len()).min(MOST_AT_ONCE.saturating_sub(start as u64));
        bytes.resize(start + length as usize, 0);
        if memory::read(memory, part.addr().0, &mut bytes[start..]).is_none() {
            bytes.truncate(start);
            break;
        }
    }
    bytes
}

/// Gives the driver what waits, each in a buffer of its own. What is longer than its buffer is cut off.
fn deliver(waiting: &mut VecDeque<Vec<u8>>, ring: &mut Ring<'_>, memory: &View) {
    while let Some(bytes) = waiting.front() {
        let Some(chain) = ring.pop() else { return };
        let head = chain.head_index();
        let mut written = 0;
        for part in chain.writable() {
            let rest = &bytes[written..];
            let some = &rest[..rest.len().min(part.len() as usize)];
            if memory::write(memory, part.addr().0, some).is_none() {
                break;
            }
            written += some.len();
        }
        waiting.pop_front();
        ring.used(head, written as u32);
    }
}

fn save_all(all: &VecDeque<Vec<u8>>, to: &mut Writer) {
    to.number(all.len() as u64);
    all.iter().for_each(|one| to.bytes(one));
}

fn load_all(from: &mut Reader<'_>) -> Result<VecDeque<Vec<u8>>> {
    let wrong = || Error::state("the machine's agent");
    let count: usize = from.number()?;
    if count > MOST_WAITING {
        return Err(wrong());
    }
    let one = |_| {
        from.bytes().and_then(|one| (one.len() <= LONGEST_WAITING).then(|| one.to_vec()).ok_or_else(wrong))
    };
    (0..count).map(one).collect()
}

impl Device for Agent {
    fn number(&self) -> u32 {
        3
    }

    fn queues(&self) -> usize {
        QUEUES
    }

    fn features(&self) -> u64 {
        PORTS
    }

    /// Two numbers for a terminal's size, which this is not, and the number of ports.
    fn configuration(&self) -> Vec<u8> {
        [0_u32, 1].map(u32::to_le_bytes).concat()
    }

    fn save(&self, to: &mut Writer) {
        to.number(self.is_open);
        to.bytes(&self.heard);
        save_all(&self.lines, to);
        save_all(&self.messages, to);
    }

    fn load(&mut self, from: &mut Reader<'_>) -> Result<()> {
        self.is_open = from.truth()?;
        let heard = from.bytes()?;
        self.heard = heard[..heard.len().min(LONGEST_LINE)].to_vec();
        self.lines = load_all(from)?;
        self.messages = load_all(from)?;
        if let Some(identity) = self.identity.take().filter(|_| self.is_open) {
            self.tell(&identity);
        }
        Ok(())
    }

    fn has_events(&self) -> bool {
        self.is_open && !self.lines.is_empty()
    }

    fn work(&mut self, rings: &mut [Ring<'_>], memory: &View, _: u64) -> bool {
        let [to_port, from_port, to_driver, from_driver] = rings else { return false };
        while let Some(chain) = from_driver.pop() {
            let head = chain.head_index();
            if let Some(message) = read(chain, memory).first_chunk() {
                self.obey(*message);
            }
            from_driver.used(head, 0);
        }
        while let Some(chain) = from_port.pop() {
            let head = chain.head_index();
            self.hear(&read(chain, memory));
            from_port.used(head, 0);
        }
        deliver(&mut self.messages, to_driver, memory);
        if self.is_open {
            deliver(&mut self.lines, to_port, memory);
        }
        false
    }

    fn reset(&mut self) {
        self.close();
        self.messages.clear();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{self, BUFFERS, Driver, with_driver};

    const ACCEPTED: u64 = 1 << 32 | PORTS;
    const TEXT: &str = "clone 7 web-7 web 0102030405060708090a0b0c0d0e0f10 02:01:02:03:04:05\n";
    const DONE: &[u8] = b"done 0102030405060708090a0b0c0d0e0f10\r\n";

    fn identity() -> Identity {
        let id = std::array::from_fn(|at| at as u8 + 1);
        Identity { number: 7, name: "web-7".into(), template: "web".into(), id }
    }

    /// Sends a message of the driver, or bytes of the agent.
    fn send(driver: &mut Driver<'_>, queue: usize, bytes: &[u8]) {
        driver.put(BUFFERS, bytes).unwrap();
        driver.offer(queue, 0, &[(BUFFERS, bytes.len() as u32, false)]);
        driver.notify(queue);
        assert_eq!(driver.used(queue), [(0, 0)]);
    }

    fn message(kind: u16, value: u16) -> Vec<u8> {
        [&PORT.to_le_bytes()[..], &kind.to_le_bytes(), &value.to_le_bytes()].concat()
    }

    /// Does what a driver does until a program has the port open.
    fn open(driver: &mut Driver<'_>) {
        driver.begin(ACCEPTED, 4);
        assert_eq!([driver.transport.read(0x100, 4), driver.transport.read(0x104, 4)], [0, 1]);
        for number in 0..4_u16 {
            driver.offer(2, number, &[(BUFFERS + 0x1000 + u64::from(number) * 0x100, 0x100, true)]);
        }
        send(driver, 3, &message(event::DEVICE_READY, 1));
        assert_eq!(driver.used(2), [(0, 8)]);
        assert_eq!(driver.bytes(BUFFERS + 0x1000, 8), message(event::ADD, 1));
        send(driver, 3, &message(event::READY, 1));
        assert_eq!(driver.used(2), [(1, 8 + NAME.len() as u32), (2, 8)]);
        assert_eq!(driver.bytes(BUFFERS + 0x1108, NAME.len()), NAME.as_bytes());
        assert_eq!(driver.bytes(BUFFERS + 0x1200, 8), message(event::OPEN, 1));
        send(driver, 3, &message(event::OPEN, 1));
    }

    fn saved(device: &dyn Device) -> Vec<u8> {
        let mut state = Writer::default();
        device.save(&mut state);
        state.finish()
    }

    /// Returns an agent in a machine that begins as a copy of one whose port was open or not.
    fn copy(is_open: bool) -> Agent {
        let mut source = Agent { is_open, ..Agent::default() };
        source.lines.push_back(b"clone of another one\n".to_vec());
        let mut agent = Agent::new(Some(identity()));
        agent.load(&mut Reader::new(&saved(&source))).unwrap();
        agent
    }

    #[test]
    fn a_copy_is_told_and_held_until_its_agent_is_done() {
        let agent = copy(true);
        let gate = agent.gate();
        assert!(gate.is_shut() && agent.has_events());
        with_driver(agent, |driver| {
            driver.begin_again(ACCEPTED, 4);
            driver.poll();
            assert!(gate.is_shut(), "there is no buffer yet");
            driver.offer(0, 0, &[(BUFFERS + 0x1000, 10, true), (BUFFERS + 0x2000, 0x1000, true)]);
            assert!(driver.notify(0));
            assert_eq!(driver.used(0), [(0, TEXT.len() as u32)]);
            let told = [driver.bytes(BUFFERS + 0x1000, 10), driver.bytes(BUFFERS + 0x2000, TEXT.len() - 10)];
            assert_eq!(String::from_utf8(told.concat()).unwrap(), TEXT);
            send(driver, 1, b"ready\ndone 0102\n");
            send(driver, 1, &[b'x'; 300]);
            send(driver, 1, b"\n");
            assert!(gate.is_shut(), "these are no answers");
            let (first, second) = DONE.split_at(9);
            send(driver, 1, first);
            assert!(gate.is_shut());
            send(driver, 1, second);
            assert!(!gate.is_shut());
        });
    }

    #[test]
    fn nothing_is_held_without_an_agent_or_without_a_copy() {
        let agent = copy(false);
        assert!(!agent.gate.is_shut() && !agent.has_events());
        let mut restored = Agent::new(None);
        restored.load(&mut Reader::new(&saved(&Agent { is_open: true, ..Agent::default() }))).unwrap();
        assert!(!restored.gate.is_shut() && !restored.has_events());
        let again = saved(&copy(true));
        let mut next = Agent::new(None);
        next.load(&mut Reader::new(&again)).unwrap();
        assert_eq!(saved(&next), again, "the line is kept until it is read");
        assert!(next.load(&mut Reader::new(&[1; 40])).is_err());
    }

    #[test]
    fn an_agent_that_goes_holds_nothing() {
        let agent = copy(true);
        let gate = agent.gate();
        with_driver(agent, |driver| {
            driver.begin_again(ACCEPTED, 4);
            send(driver, 3, &message(event::OPEN, 0));
            assert!(!gate.is_shut());
        });
        let agent = copy(true);
        let gate = agent.gate();
        with_driver(agent, |driver| {
            open(driver);
            assert!(!gate.is_shut(), "the driver has begun anew");
            driver.offer(0, 0, &[(BUFFERS + 0x4000, 0x100, true)]);
            driver.notify(0);
            assert_eq!(driver.used(0), []);
        });
    }

    proptest! {
        #[test]
        fn no_driver_makes_it_panic(all in testing::anything()) {
            with_driver(copy(true), |driver| testing::torture(driver, all));
        }

        #[test]
        fn no_chain_makes_it_panic(chains in testing::chains()) {
            with_driver(copy(true), |driver| testing::give_chains(driver, 4, &chains));
        }
    }
}
