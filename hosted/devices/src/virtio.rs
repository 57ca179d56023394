//! The registers of a virtio device in memory (virtio 1.2, 4.2: version 2 of the transport), and its queues.

use std::fmt;

use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueState, QueueT};

use crate::{
    error::{Error, Result},
    memory::View,
    state::{Reader, Writer},
};

/// Bytes of a device's registers.
pub const WINDOW: u64 = 0x1000;
const QUEUE_SIZE: u16 = 256;
const MAGIC: u32 = 0x7472_6976;
const VERSION: u32 = 2;
const VENDOR: u32 = 0x4372_654D;
const VERSION_1: u64 = 1 << 32;
/// A feature: driver and device say by a position at which buffer they want to be told next.
pub(crate) const EVENT_POSITIONS: u64 = 1 << 29;
/// Why the driver is interrupted.
mod interrupt {
    pub const USED_BUFFER: u32 = 1;
    pub const CONFIGURATION: u32 = 2;
}
/// A bit of the status: the driver is ready to use the device.
const DRIVER_OK: u32 = 4;
/// A bit of the status: the driver has chosen from the features.
const FEATURES_OK: u32 = 8;

/// Offsets of registers (virtio 1.2, 4.2.2).
mod register {
    pub const MAGIC: u64 = 0x00;
    pub const VERSION: u64 = 0x04;
    pub const DEVICE: u64 = 0x08;
    pub const VENDOR: u64 = 0x0C;
    pub const FEATURES: u64 = 0x10;
    pub const FEATURES_SELECT: u64 = 0x14;
    pub const DRIVER_FEATURES: u64 = 0x20;
    pub const DRIVER_FEATURES_SELECT: u64 = 0x24;
    pub const QUEUE_SELECT: u64 = 0x30;
    pub const QUEUE_MOST: u64 = 0x34;
    pub const QUEUE_SIZE: u64 = 0x38;
    pub const QUEUE_READY: u64 = 0x44;
    pub const NOTIFY: u64 = 0x50;
    pub const INTERRUPT: u64 = 0x60;
    pub const ACKNOWLEDGE: u64 = 0x64;
    pub const STATUS: u64 = 0x70;
    pub const DESCRIPTORS: u64 = 0x80;
    pub const AVAILABLE: u64 = 0x90;
    pub const USED: u64 = 0xA0;
    pub const GENERATION: u64 = 0xFC;
    pub const CONFIGURATION: u64 = 0x100;
}

/// A device with its registers in front of it.
pub trait Device: fmt::Debug + Send {
    /// Its number among virtio's devices.
    fn number(&self) -> u32;

    /// Returns the number of queues.
    fn queues(&self) -> usize {
        1
    }

    /// Returns the features that the device offers.
    fn features(&self) -> u64 {
        0
    }

    /// Its configuration, as far as it is not zero.
    fn configuration(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Takes a word that the driver writes into the configuration.
    fn configure(&mut self, _at: u64, _value: u32) {}

    /// Returns the part of the configuration in which a device differs from that of another machine.
    fn identity(&self) -> Vec<u8> {
        self.configuration()
    }

    /// Writes the state that the driver can see in the configuration.
    fn save(&self, _to: &mut Writer) {}

    /// Takes such a state.
    ///
    /// # Errors
    /// If it makes no sense.
    fn load(&mut self, _from: &mut Reader<'_>) -> Result<()> {
        Ok(())
    }

    /// Does the driver's requests, and delivers events from outside. Returns true if the
    /// configuration has changed.
    fn work(&mut self, rings: &mut [Ring<'_>], memory: &View, accepted: u64) -> bool;

    /// Returns true if the device has work by itself, and false if only the driver's notices give it some.
    fn has_events(&self) -> bool {
        true
    }

    /// Forgets what it was asked for: nothing of the guest's memory is used afterwards.
    fn reset(&mut self) {}

    /// Returns true if the host has none of the driver's requests.
    fn is_idle(&self) -> bool {
        true
    }

    /// Returns the time at which the device's content changed last, or zeros if it has none that the host
    /// dates.
    fn changed(&self) -> [u64; 2] {
        [0; 2]
    }
}

/// A queue while its device works.
#[derive(Debug)]
pub struct Ring<'a> {
    queue: &'a mut Queue,
    view: &'a View,
    is_valid: bool,
    was_used: bool,
}

impl<'a> Ring<'a> {
    fn new(queue: &'a mut Queue, view: &'a View) -> Self {
        let is_valid = queue.ready() && queue.is_valid(view);
        Self { queue, view, is_valid, was_used: false }
    }

    /// Returns the next buffer that the driver has put there.
    pub fn pop(&mut self) -> Option<DescriptorChain<&'a View>> {
        if self.is_valid { self.queue.pop_descriptor_chain(self.view) } else { None }
    }

    /// Takes back the last pops: these buffers come again.
    pub fn put_back(&mut self, count: usize) {
        (0..count).for_each(|_| self.queue.go_to_previous_position());
    }

    /// Gives a buffer back, with so many bytes written. A driver that has destroyed its rings waits
    /// for ever.
    pub fn used(&mut self, head: u16, written: u32) {
        self.was_used |= self.is_valid && self.queue.add_used(self.view, head, written).is_ok();
    }

    /// Returns the next buffer as [`Self::pop`] does. If there is none, the driver notifies the device of the
    /// next one, although it may have accepted [`EVENT_POSITIONS`].
    pub fn pop_or_await(&mut self) -> Option<DescriptorChain<&'a View>> {
        let chain = self.pop();
        let has_more =
            chain.is_none() && self.is_valid && self.queue.enable_notification(self.view).unwrap_or(false);
        if has_more { self.pop() } else { chain }
    }

    fn wants_interrupt(&mut self) -> bool {
        self.was_used && self.queue.needs_notification(self.view).unwrap_or(true)
    }
}

/// A device and its registers.
#[derive(Debug)]
pub struct Transport {
    device: Box<dyn Device>,
    queues: Vec<Queue>,
    selected: u32,
    offered_half: u32,
    accepted_half: u32,
    accepted: u64,
    status: u32,
    interrupt: u32,
    generation: u32,
}

impl Transport {
    /// Registers for a device.
    ///
    /// # Errors
    /// If there can be no queue.
    pub fn new(device: Box<dyn Device>) -> Result<Self> {
        let wrong = |error| Error::bug(format!("cannot make a queue: {error}"));
        let queue = |_| Queue::new(QUEUE_SIZE).map_err(wrong);
        let queues = (0..device.queues()).map(queue).collect::<Result<_>>()?;
        Ok(Self {
            device,
            queues,
            selected: 0,
            offered_half: 0,
            accepted_half: 0,
            accepted: 0,
            status: 0,
            interrupt: 0,
            generation: 0,
        })
    }

    fn features(&self) -> u64 {
        self.device.features() | VERSION_1
    }

    /// Returns true if a driver uses the device.
    #[must_use]
    pub fn is_driven(&self) -> bool {
        self.status & DRIVER_OK != 0
    }

    #[must_use]
    pub fn read(&self, offset: u64, size: usize) -> u64 {
        if let Some(at) = offset.checked_sub(register::CONFIGURATION) {
            return field(&self.device.configuration(), at as usize, size);
        }
        let queue = self.queues.get(self.selected as usize);
        let value = match offset {
            register::MAGIC => MAGIC,
            register::VERSION => VERSION,
            register::DEVICE => self.device.number(),
            register::VENDOR => VENDOR,
            register::FEATURES if self.offered_half == 0 => self.features() as u32,
            register::FEATURES if self.offered_half == 1 => (self.features() >> 32) as u32,
            register::QUEUE_MOST => queue.map_or(0, |queue| queue.max_size().into()),
            register::QUEUE_READY => queue.is_some_and(QueueT::ready).into(),
            register::INTERRUPT => self.interrupt,
            register::STATUS => self.status,
            register::GENERATION => self.generation,
            _ => 0,
        };
        value.into()
    }

    /// Returns true if a write to this register tells the device that there is work.
    #[must_use]
    pub fn is_notice(offset: u64) -> bool {
        offset == register::NOTIFY
    }

    /// Writes a register. Says whether the driver is to be interrupted.
    pub fn write(&mut self, offset: u64, value: u64, memory: &View) -> bool {
        let value = value as u32;
        if let Some(at) = offset.checked_sub(register::CONFIGURATION) {
            self.device.configure(at, value);
            return false;
        }
        match offset {
            register::FEATURES_SELECT => self.offered_half = value,
            register::DRIVER_FEATURES_SELECT => self.accepted_half = value,
            register::DRIVER_FEATURES if self.accepted_half < 2 => {
                let shift = self.accepted_half * 32;
                self.accepted = self.accepted & !(0xFFFF_FFFF << shift) | u64::from(value) << shift;
            }
            register::QUEUE_SELECT => self.selected = value,
            register::NOTIFY => return self.work(memory),
            register::ACKNOWLEDGE => self.interrupt &= !value,
            register::STATUS if value == 0 => self.reset(),
            register::STATUS if self.accepted & !self.features() != 0 => self.status = value & !FEATURES_OK,
            register::STATUS => {
                self.status = value;
                let has_positions = self.accepted & EVENT_POSITIONS != 0;
                self.queues.iter_mut().for_each(|queue| queue.set_event_idx(has_positions));
            }
            _ => self.write_queue(offset, value),
        }
        false
    }

    fn write_queue(&mut self, offset: u64, value: u32) {
        let Some(queue) = self.queues.get_mut(self.selected as usize) else { return };
        let (low, high) = if offset & 4 == 0 { (Some(value), None) } else { (None, Some(value)) };
        match offset {
            register::QUEUE_SIZE => queue.set_size(value.min(u32::from(QUEUE_SIZE)) as u16),
            register::QUEUE_READY => queue.set_ready(value == 1),
            at if at & !4 == register::DESCRIPTORS => queue.set_desc_table_address(low, high),
            at if at & !4 == register::AVAILABLE => queue.set_avail_ring_address(low, high),
            at if at & !4 == register::USED => queue.set_used_ring_address(low, high),
            _ => {}
        }
    }

    fn reset(&mut self) {
        self.device.reset();
        self.queues.iter_mut().for_each(QueueT::reset);
        (self.status, self.interrupt, self.selected, self.accepted) = (0, 0, 0, 0);
    }

    /// Returns true if the host has none of the driver's requests.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.device.is_idle()
    }

    /// Writes the state of the registers and queues, and what the device is. An idle device has no other
    /// state but frames on their way, which a network may lose.
    pub fn save(&self, to: &mut Writer) {
        to.numbers([self.device.number(), self.selected, self.offered_half, self.accepted_half]);
        to.numbers([self.status, self.interrupt, self.generation]);
        to.numbers([self.features(), self.accepted]);
        to.bytes(&self.device.identity());
        to.numbers(self.device.changed());
        self.device.save(to);
        to.number(self.queues.len() as u64);
        for queue in self.queues.iter().map(Queue::state) {
            to.numbers([queue.max_size, queue.next_avail, queue.next_used, queue.size]);
            to.numbers([queue.event_idx_enabled, queue.ready]);
            to.numbers([queue.desc_table, queue.avail_ring, queue.used_ring]);
        }
    }

    /// Takes the state of a device like this one.
    ///
    /// # Errors
    /// If it is another device's.
    pub fn load(&mut self, from: &mut Reader<'_>) -> Result<()> {
        let other = || {
            Error::new("the saved machine had other devices").hint(
                "give it the disks that it had, in the same order, as large and as writable as they were",
            )
        };
        let number: u32 = from.number()?;
        for register in [&mut self.selected, &mut self.offered_half, &mut self.accepted_half] {
            *register = from.number()?;
        }
        for register in [&mut self.status, &mut self.interrupt, &mut self.generation] {
            *register = from.number()?;
        }
        let features: u64 = from.number()?;
        self.accepted = from.number()?;
        let is_same = number == self.device.number()
            && features == self.features()
            && from.bytes()? == self.device.identity();
        if !is_same {
            return Err(other());
        }
        let changed: [u64; 2] = [from.number()?, from.number()?];
        if changed != self.device.changed() {
            return Err(Error::new("a disk has changed since the machine was saved").hint(
                "a saved machine goes on once: its disks go on with it; put back copies of that time (cp -p)",
            ));
        }
        self.device.load(from)?;
        if from.number::<usize>()? != self.queues.len() {
            return Err(other());
        }
        self.queues.iter_mut().try_for_each(|queue| load_queue(queue, from))
    }

    /// Lets the device deliver what has come from outside. Says whether the driver is to be interrupted.
    pub fn poll(&mut self, memory: &View) -> bool {
        self.device.has_events() && self.work(memory)
    }

    /// Lets the device work. Says whether the driver is to be interrupted.
    pub fn work(&mut self, memory: &View) -> bool {
        let mut rings: Vec<Ring<'_>> = self.queues.iter_mut().map(|queue| Ring::new(queue, memory)).collect();
        let has_changed = self.device.work(&mut rings, memory, self.accepted);
        if rings.iter().any(|ring| ring.was_used) {
            self.interrupt |= interrupt::USED_BUFFER;
        }
        if has_changed {
            self.interrupt |= interrupt::CONFIGURATION;
            self.generation = self.generation.wrapping_add(1);
        }
        rings.iter_mut().fold(has_changed, |wanted, ring| ring.wants_interrupt() || wanted)
    }
}

fn load_queue(queue: &mut Queue, from: &mut Reader<'_>) -> Result<()> {
    let state = QueueState {
        max_size: from.number()?,
        next_avail: from.number()?,
        next_used: from.number()?,
        size: from.number()?,
        event_idx_enabled: from.truth()?,
        ready: from.truth()?,
        desc_table: from.number()?,
        avail_ring: from.number()?,
        used_ring: from.number()?,
    };
    let wrong = |error| Error::state(format_args!("a queue ({error})"));
    *queue = Queue::try_from(state).map_err(wrong)?;
    Ok(())
}

/// Returns a little-endian field of a configuration. It is zero after the configuration's end.
fn field(bytes: &[u8], at: usize, size: usize) -> u64 {
    let byte = |index: usize| bytes.get(at.saturating_add(index)).copied().unwrap_or(0);
    (0..size.min(8)).rev().fold(0, |value, index| value << 8 | u64::from(byte(index)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_of_the_configuration_is_zero_behind_its_end() {
        let bytes = [1, 2, 3];
        assert_eq!(
            [(0, 1), (0, 2), (1, 4), (3, 8), (usize::MAX, 8)].map(|(at, size)| field(&bytes, at, size)),
            [1, 0x201, 0x302, 0, 0]
        );
    }
}
