//! The devices that a running kernel touches: few of a PC's, and virtio's. Everything else reads as all
//! ones, as an empty bus does.

mod doorbell;
mod hpet;
mod keyboard;
pub mod local;
mod pci;
mod power;
pub mod words;

use crate::{
    acpi::Tables,
    calls::ANSWER,
    layout::{PAGE_BYTES, WINDOWS},
    wires::Wire,
};
use doorbell::Doorbell;
use hpet::Hpet;
use keyboard::Keyboard;
use local::Local;
use mercury_abi::guest::{
    GUEST_SLOTS_MAX, GuestDescription, GuestSlot, MERCURY_GUEST_MAGIC, MERCURY_GUEST_VERSION,
};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_devices::{
    clock::Clock,
    memory::View,
    serial::{REGISTERS, Serial},
    virtio::{Device, Transport, WINDOW},
};
use mercury_image::Device as PciDevice;
use pci::Pci;
pub(crate) use pci::place;
use power::Power;
use std::{ops::Range, sync::Arc};
use words::Words;

/// Ports of devices that every PC has.
mod port {
    pub const SERIAL: [u16; 2] = [0x3F8, 0x2F8];
    pub const CLOCK: [u16; 2] = [0x70, 0x71];
    pub const KEYBOARD: [u16; 2] = [crate::platform::keyboard::DATA, crate::platform::keyboard::COMMAND];
    /// Address of PCI's configuration, and data.
    pub const PCI_ADDRESS: u16 = 0xCF8;
    pub const PCI_DATA: std::ops::RangeInclusive<u16> = 0xCFC..=0xCFF;
    pub const RESET: u16 = 0xCF9;
}
/// Interrupts of the serial ports.
const SERIAL_LINES: [u32; 2] = [4, 3];
/// Interrupts for virtio devices, in the order in which they are chosen: of devices that a machine hardly
/// has, and of those that are gone.
const FREE_LINES: [u32; 10] = [5, 10, 11, 7, 6, 14, 15, 12, 20, 21];
/// Bit of the reset register that resets the processor.
const RESET_NOW: u8 = 1 << 2;

/// The end of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The kernel has powered the machine off.
    PoweredOff,
    /// The kernel has reset the machine, which has no firmware to start it again.
    Reset,
    /// An operator has ended the guest.
    Stopped,
    /// The guest cannot go on, and why.
    Failed(String),
}

/// The interrupt controllers.
pub trait Lines: Send + Sync {
    /// Sets the level of a global system interrupt.
    fn set(&self, line: u32, is_high: bool);

    /// Raises an edge.
    fn pulse(&self, line: u32) {
        self.set(line, true);
        self.set(line, false);
    }
    /// Delivers the message of an interrupt.
    fn message(&self, address: u64, data: u32);
}

/// The machine's own hardware, as far as it decides what its kernel sees.
#[derive(Debug)]
pub struct Board<'a> {
    /// The firmware's tables.
    pub tables: &'a Tables,
    /// PCI devices, of which only bridges stay.
    pub devices: &'a [PciDevice],
    /// Rate of the HPET; 0 if there is none.
    pub hpet_hz: u64,
    /// Addresses that read as zeros: memory of the firmware that the image does not hold. All ones would be
    /// records of errors there.
    pub zeros: Vec<Range<u64>>,
    /// Controllers of the machine's own disks.
    pub locals: Vec<Local>,
    /// Milliseconds by which the clock (RTC) is ahead of the host's time.
    pub clock_ahead_ms: i64,
}

/// A virtio device and its interrupt.
#[derive(Debug)]
struct Slot {
    transport: Transport,
    /// Number of its window.
    place: u64,
    line: u32,
    number: u32,
}

/// Windows and interrupts for virtio devices. A kernel that was a guest before, with other devices, drives
/// those that it finds at the same windows, and lets the others go. So a window is always of one kind of
/// device.
struct Places {
    lines: Vec<u32>,
    taken: Vec<u64>,
}

impl Places {
    /// Windows of the network card and of the source of random numbers, by the kind's number in the standard.
    const FIXED: [(u32, u64); 2] = [(1, 0), (4, 1)];
    /// Place of the doorbell's line among the free ones: after those of the fixed windows.
    const DOORBELL: u64 = 2;

    /// Takes a window and a line for a device of this kind.
    fn take(&mut self, number: u32) -> Option<(u64, u32)> {
        let fixed = Self::FIXED.iter().find(|(kind, _)| *kind == number).map(|(_, place)| *place);
        let others = Self::DOORBELL..GUEST_SLOTS_MAX as u64;
        let place = fixed.into_iter().chain(others).find(|place| !self.taken.contains(place))?;
        // The last device may take the doorbell's line: then nobody can order a move.
        let line = self.line_of(place).or_else(|| {
            let is_last = self.line_of(place - 1).is_some() && self.doorbell().is_some();
            is_last.then(|| self.lines[Self::DOORBELL as usize])
        })?;
        self.taken.push(place);
        Some((place, line))
    }

    /// Returns the line of a window. Those beyond the doorbell's are one further.
    fn line_of(&self, place: u64) -> Option<u32> {
        let at = place + u64::from(place >= Self::DOORBELL);
        self.lines.get(usize::try_from(at).ok()?).copied()
    }

    /// Returns the doorbell's line, if no device has taken it.
    fn doorbell(&self) -> Option<u32> {
        let is_taken = self.taken.iter().any(|place| self.line_of(*place).is_none());
        self.lines.get(Self::DOORBELL as usize).copied().filter(|_| !is_taken)
    }
}

/// A serial port, and what is connected to it.
#[derive(Debug)]
struct Port {
    serial: Serial,
    wire: Arc<Wire>,
    line: u32,
    /// Level of the line, as the interrupt controllers have it.
    is_high: bool,
}

impl Port {
    /// Gives the interrupt controllers the level of the port's line, and an edge for each rise.
    fn drive(&mut self, lines: &dyn Lines) {
        if self.serial.wants_attention() {
            if self.is_high {
                lines.set(self.line, false);
            }
            lines.set(self.line, true);
            self.is_high = true;
        }
        if self.is_high && !self.serial.is_raised() {
            lines.set(self.line, false);
            self.is_high = false;
        }
    }
}

/// The devices of a guest.
pub struct Platform {
    lines: Arc<dyn Lines>,
    power: Power,
    clock: Clock,
    keyboard: Keyboard,
    serials: Vec<Port>,
    pci: Pci,
    hpet: Option<Hpet>,
    zeros: Vec<Range<u64>>,
    slots: Vec<Slot>,
    doorbell: Doorbell,
    words: Words,
    view: View,
    ended: Option<End>,
}

impl std::fmt::Debug for Platform {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Platform")
            .field("slots", &self.slots)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

impl Platform {
    /// Makes the devices. Orders for the guest come by the wire `orders`.
    ///
    /// # Errors
    /// There are more virtio devices than interrupts.
    pub fn new(
        lines: Arc<dyn Lines>,
        board: Board<'_>,
        wires: [Arc<Wire>; 2],
        orders: Arc<Wire>,
        devices: Vec<Box<dyn Device>>,
        view: View,
    ) -> Result<Self> {
        let tables = board.tables;
        let is_free = |line: &u32| {
            let is_own = board.locals.iter().any(|local| local.line == Some(*line));
            *line != tables.ports.interrupt && !tables.overridden.contains(line) && !is_own
        };
        let mut places =
            Places { lines: FREE_LINES.into_iter().filter(is_free).collect(), taken: Vec::new() };
        let mut slots = Vec::new();
        for device in devices {
            let number = device.number();
            let (place, line) = places.take(number).ok_or_else(|| {
                let text = format!("a guest has at most {} devices of these kinds", slots.len());
                Error::new(Exit::Failed, text).hint("give it fewer with --disk")
            })?;
            let transport = Transport::new(device).map_err(crate::run::failed)?;
            slots.push(Slot { transport, place, line, number });
        }
        let doorbell = Doorbell::new(orders, places.doorbell());
        let port = |(wire, line)| Port { serial: Serial::default(), wire, line, is_high: false };
        let serials = wires.into_iter().zip(SERIAL_LINES).map(port);
        Ok(Self {
            lines,
            power: Power::new(tables.ports.clone()),
            clock: Clock::ahead_by(board.clock_ahead_ms),
            keyboard: Keyboard::default(),
            serials: serials.collect(),
            pci: Pci::new(board.devices, board.locals),
            hpet: Hpet::new(tables.hpet_phys, board.hpet_hz),
            zeros: board.zeros,
            slots,
            doorbell,
            words: Words::default(),
            view,
            ended: None,
        })
    }

    /// Takes the words of the host's operator.
    pub fn set_words(&mut self, words: Words) {
        self.words = words;
    }

    /// Sets the milliseconds by which the clock (RTC) is ahead of the host's time.
    pub fn set_clock(&mut self, ahead_ms: i64) {
        self.clock = Clock::ahead_by(ahead_ms);
    }

    /// Returns the description of the virtio devices for the driver.
    #[must_use]
    pub fn description(&self) -> GuestDescription {
        let mut description = GuestDescription {
            magic: MERCURY_GUEST_MAGIC,
            version: MERCURY_GUEST_VERSION,
            count: self.slots.len() as u32,
            slots: [GuestSlot::default(); GUEST_SLOTS_MAX],
            doorbell_gsi: self.doorbell.line.unwrap_or(0),
            reserved: 0,
        };
        for (entry, slot) in description.slots.iter_mut().zip(&self.slots) {
            *entry = GuestSlot {
                window_phys: WINDOWS.start + slot.place * PAGE_BYTES,
                window_bytes: WINDOW as u32,
                gsi: slot.line,
                device: slot.number,
                reserved: 0,
            };
        }
        description
    }

    /// Returns true if a driver of the guest's has taken one of the virtio devices.
    #[must_use]
    pub fn is_driven(&self) -> bool {
        self.slots.iter().any(|slot| slot.transport.is_driven())
    }

    /// Returns the end of the guest, if it has come.
    #[must_use]
    pub fn ended(&self) -> Option<&End> {
        self.ended.as_ref()
    }

    /// Ends the guest. The first end stays.
    pub fn end(&mut self, end: End) {
        self.ended.get_or_insert(end);
    }

    /// Reads a port.
    pub fn read_port(&mut self, port: u16, data: &mut [u8]) {
        if let Some((number, register)) = serial_of(port) {
            let port = &mut self.serials[number];
            data.iter_mut().for_each(|byte| *byte = port.serial.read(register));
            return self.feed(number);
        }
        if let Some(()) = self.power.read(port, data) {
            return;
        }
        match port {
            _ if port::CLOCK.contains(&port) => data.fill(self.clock.read(port)),
            _ if port::KEYBOARD.contains(&port) => data.fill(self.keyboard.read(port)),
            port::PCI_ADDRESS if data.len() == 4 => data.copy_from_slice(&self.pci.address().to_le_bytes()),
            _ if port::PCI_DATA.contains(&port) => self.pci.read(port & 3, data),
            ANSWER if data.len() == 1 => data[0] = self.words.take(),
            _ => data.fill(0xFF),
        }
    }

    /// Writes a port.
    pub fn write_port(&mut self, port: u16, data: &[u8]) {
        let Some(&first) = data.first() else { return };
        if let Some((number, register)) = serial_of(port) {
            let port = &mut self.serials[number];
            for byte in data {
                let sent = port.serial.write(register, *byte);
                port.wire.send(&sent);
            }
            return self.feed(number);
        }
        if let Some(end) = self.power.write(port, data) {
            return self.end(end);
        }
        match port {
            _ if port::CLOCK.contains(&port) => self.clock.write(port, first),
            port::PCI_ADDRESS => {
                if let Ok(bytes) = data.try_into() {
                    self.pci.select(u32::from_le_bytes(bytes));
                }
            }
            _ if port::PCI_DATA.contains(&port) => self.pci.write(port & 3, data),
            port::RESET if first & RESET_NOW != 0 => self.end(End::Reset),
            ANSWER => self.doorbell.answer(data),
            _ if port::KEYBOARD.contains(&port) && self.keyboard.write(port, first) => self.end(End::Reset),
            _ => {}
        }
    }

    /// Reads registers in memory.
    pub fn read_memory(&self, phys: u64, data: &mut [u8]) {
        if self.pci.locals().iter().any(|local| local.read(phys, data)) {
            return;
        }
        if let Some((hpet, offset)) = self.hpet.as_ref().and_then(|hpet| Some((hpet, hpet.offset(phys)?))) {
            return hpet.read(offset, data);
        }
        let is_zero = self.zeros.iter().any(|range| range.contains(&phys));
        data.fill(if is_zero { 0 } else { 0xFF });
        let Some((slot, offset)) = self.slot_at(phys) else { return };
        let value = self.slots[slot].transport.read(offset, data.len());
        let length = data.len().min(8);
        data[..length].copy_from_slice(&value.to_le_bytes()[..length]);
    }

    /// Writes registers in memory.
    pub fn write_memory(&mut self, phys: u64, data: &[u8]) {
        if self.pci.locals().iter().any(|local| local.write(phys, data)) {
            return;
        }
        if let Some((hpet, offset)) =
            self.hpet.as_mut().and_then(|hpet| hpet.offset(phys).map(|at| (hpet, at)))
        {
            return hpet.write(offset, data);
        }
        let Some((slot, offset)) = self.slot_at(phys) else { return };
        let mut value = [0; 8];
        let length = data.len().min(8);
        value[..length].copy_from_slice(&data[..length]);
        let slot = &mut self.slots[slot];
        if slot.transport.write(offset, u64::from_le_bytes(value), &self.view) {
            self.lines.pulse(slot.line);
        }
    }

    fn slot_at(&self, phys: u64) -> Option<(usize, u64)> {
        let offset = phys.checked_sub(WINDOWS.start)?;
        let slot = self.slots.iter().position(|slot| slot.place == offset / WINDOW)?;
        Some((slot, offset % WINDOW))
    }

    /// Takes events from outside: typed bytes, frames of the network, answers of disks.
    pub fn poll(&mut self) {
        (0..self.serials.len()).for_each(|number| self.feed(number));
        if self.serials.iter().any(|port| port.wire.was_left()) {
            self.end(End::Stopped);
        }
        if let Some(line) = self.doorbell.take(&self.view) {
            self.lines.pulse(line);
        }
        for slot in &mut self.slots {
            if slot.transport.work(&self.view) {
                self.lines.pulse(slot.line);
            }
        }
    }

    /// Gives a serial port the bytes that wait for it, and its interrupt to the processors.
    fn feed(&mut self, number: usize) {
        let port = &mut self.serials[number];
        let room = port.serial.room();
        if room > 0 {
            port.serial.receive(&port.wire.take(room));
        }
        port.drive(&*self.lines);
    }
}

/// Returns the number of a serial port, and its register.
fn serial_of(port: u16) -> Option<(usize, u8)> {
    port::SERIAL.into_iter().enumerate().find_map(|(number, base)| {
        let register = port.checked_sub(base).filter(|register| *register < REGISTERS)?;
        Some((number, register as u8))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::acpi::tests::firmware;
    use mercury_devices::Rng;
    use std::sync::Mutex;
    use vm_memory::GuestAddress;

    #[derive(Clone, Default)]
    struct Recorded(Arc<Mutex<Vec<(u32, bool)>>>);

    impl Recorded {
        fn take(&self) -> Vec<(u32, bool)> {
            std::mem::take(&mut self.0.lock().unwrap())
        }
    }

    impl Lines for Recorded {
        fn set(&self, line: u32, is_high: bool) {
            self.0.lock().unwrap().push((line, is_high));
        }

        fn message(&self, _: u64, data: u32) {
            self.0.lock().unwrap().push((data, true));
        }
    }

    fn platform(devices: usize) -> (Result<Platform>, Recorded, [Arc<Wire>; 2]) {
        let lines = Recorded::default();
        let tables = Tables::find(&firmware()).unwrap();
        let wires = [Arc::new(Wire::loose()), Arc::new(Wire::loose())];
        let view = View::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        let devices = (0..devices).map(|_| Box::new(Rng) as Box<dyn Device>).collect();
        let zeros = std::iter::once(0x7FF_0000..0x7FF_1000).collect();
        let (metal, locals) = (&[][..], Vec::new());
        let board =
            Board { tables: &tables, devices: metal, hpet_hz: 100_000_000, zeros, locals, clock_ahead_ms: 0 };
        let made = Platform::new(
            Arc::new(lines.clone()),
            board,
            wires.clone(),
            Arc::new(Wire::loose()),
            devices,
            view,
        );
        (made, lines, wires)
    }

    #[test]
    fn devices_have_windows_and_interrupts_that_nothing_else_uses() {
        let description = platform(2).0.unwrap().description();
        assert_eq!((description.magic, description.count), (MERCURY_GUEST_MAGIC, 2));
        let [first, second, third, ..] = description.slots;
        // The firmware describes 5 otherwise, and 9 is its own.
        assert_eq!((first.window_phys, first.gsi, first.device), (WINDOWS.start + 0x1000, 11, 4));
        assert_eq!((second.window_phys, second.gsi), (WINDOWS.start + 0x2000, 6));
        assert_eq!((third, description.doorbell_gsi), (GuestSlot::default(), 7));
        assert!(platform(10).0.unwrap_err().message.contains("at most 8"));
    }

    /// A guest's image may go on with other devices than it was written with. A driver must not find another
    /// kind of device at its window, with or without a network card and whatever disks there are.
    #[test]
    fn each_kind_of_device_has_its_own_windows_and_lines() {
        let [net, disk, random] = [1, 2, 4];
        let places = |kinds: &[u32]| {
            let mut places = Places { lines: (50..59).collect(), taken: Vec::new() };
            let taken: Vec<_> = kinds.iter().map(|kind| places.take(*kind)).collect();
            (taken, places.doorbell())
        };
        let (own, random_s) = ((0, 50), (1, 51));
        let expect = |kinds: &[u32], expected: &[(u64, u32)]| {
            let expected: Vec<_> = expected.iter().copied().map(Some).collect();
            assert_eq!(places(kinds), (expected, Some(52)), "{kinds:?}");
        };
        expect(&[net, random], &[own, random_s]);
        expect(&[random], &[random_s]);
        expect(&[net, disk, disk, random], &[own, (2, 53), (3, 54), random_s]);
        expect(&[disk, random], &[(2, 53), random_s]);
        // As many devices as there are lines, without a line for the doorbell then.
        let (taken, doorbell) = places(&[net, disk, disk, disk, disk, disk, disk, disk, random]);
        let mut lines: Vec<u32> = taken.iter().map(|one| one.unwrap().1).collect();
        lines.sort_unstable();
        assert_eq!((lines, doorbell), ((50..59).collect(), None));
        let (taken, _) = places(&[net, disk, disk, disk, disk, disk, disk, disk, disk, random]);
        assert_eq!(taken.iter().filter(|one| one.is_none()).count(), 1);
    }

    #[test]
    fn registers_of_virtio_devices_are_at_their_windows_and_all_else_is_an_empty_bus() {
        let (platform, lines, _) = platform(1);
        let mut platform = platform.unwrap();
        let read = |platform: &Platform, phys: u64| {
            let mut data = [0; 4];
            platform.read_memory(phys, &mut data);
            u32::from_le_bytes(data)
        };
        let window = WINDOWS.start + 0x1000;
        assert_eq!(read(&platform, window), 0x7472_6976);
        assert_eq!(read(&platform, window + 8), 4);
        for phys in [WINDOWS.start, window + 0x1000, WINDOWS.start - 4, 0xE000_0000, u64::MAX] {
            assert_eq!(read(&platform, phys), u32::MAX, "{phys:#x}");
            platform.write_memory(phys, &[1; 4]);
        }
        assert_eq!(read(&platform, 0x7FF_0010), 0);
        assert_eq!(read(&platform, 0xFED0_0004), 10_000_000, "the HPET's femtoseconds");
        platform.write_memory(0xFED0_00F0, &5_u32.to_le_bytes());
        assert_eq!(read(&platform, 0xFED0_00F0), 5);
        platform.write_memory(window + 0x70, &7_u32.to_le_bytes());
        assert_eq!(read(&platform, window + 0x70), 7);
        assert!(lines.0.lock().unwrap().is_empty());
    }

    #[test]
    fn ports_of_what_is_gone_read_as_ones() {
        let mut platform = platform(0).0.unwrap();
        let read = |platform: &mut Platform, port: u16| {
            let mut data = [0; 4];
            platform.read_port(port, &mut data);
            u32::from_le_bytes(data)
        };
        platform.write_port(0xCF8, &0x8000_F804_u32.to_le_bytes());
        assert_eq!(read(&mut platform, 0xCF8), 0x8000_F804);
        assert_eq!(read(&mut platform, 0xCFC), u32::MAX);
        assert_eq!(read(&mut platform, 0x1F7), u32::MAX);
        assert_eq!(read(&mut platform, 0x64) & 0xFF, 4);
        assert_eq!(read(&mut platform, 0x600), 0);
    }

    #[test]
    fn serial_ports_carry_bytes_both_ways() {
        let (platform, lines, wires) = platform(0);
        let mut platform = platform.unwrap();
        platform.write_port(0x2F9, &[1]);
        platform.write_port(0x2F8, b"ok");
        wires[1].receive(b"to");
        platform.poll();
        let mut byte = [0];
        platform.read_port(0x2F8, &mut byte);
        assert_eq!((wires[1].sent(), byte), (b"ok".to_vec(), [b't']));
        assert_eq!(lines.take(), [(3, true)]);
        platform.read_port(0x2F8, &mut byte);
        assert_eq!((lines.take(), byte), (vec![(3, false)], [b'o']));
        assert!(wires[0].sent().is_empty());
    }

    #[test]
    fn a_serial_port_holds_its_line_and_raises_it_when_its_driver_listens_again() {
        let (platform, lines, wires) = platform(0);
        let mut platform = platform.unwrap();
        platform.write_port(0x3F9, &[1]);
        wires[0].receive(b"x");
        platform.poll();
        platform.poll();
        assert_eq!(lines.take(), [(4, true)]);
        platform.write_port(0x3F9, &[0]);
        assert_eq!(lines.take(), [(4, false)]);
        platform.write_port(0x3F9, &[1]);
        assert_eq!(lines.take(), [(4, true)]);
        // The transmitter: an edge for each byte, and low after the driver has asked.
        platform.read_port(0x3F8, &mut [0]);
        platform.write_port(0x3F9, &[2]);
        platform.write_port(0x3F8, b"y");
        assert_eq!(lines.take(), [(4, false), (4, true), (4, false), (4, true)]);
        platform.read_port(0x3FA, &mut [0]);
        assert_eq!(lines.take(), [(4, false)]);
    }

    #[test]
    fn each_way_to_reset_or_power_off_ends_the_guest_once() {
        let cases: [(u16, &[u8], End); 5] = [
            (0xCF9, &[0x0E], End::Reset),
            (0xCF9, &[0x0F], End::Reset),
            (0x64, &[0xFE], End::Reset),
            (0x604, &[0, 0x38], End::PoweredOff),
            (0x604, &[0, 0x20], End::PoweredOff),
        ];
        for (port, data, end) in cases {
            let mut platform = platform(0).0.unwrap();
            platform.write_port(0xCF9, &[2]);
            platform.write_port(0x64, &[0xD1]);
            platform.write_port(0x604, &[1, 0]);
            assert_eq!(platform.ended(), None);
            platform.write_port(port, data);
            assert_eq!(platform.ended(), Some(&end));
            platform.end(End::Stopped);
            assert_eq!(platform.ended(), Some(&end));
        }
    }
}
