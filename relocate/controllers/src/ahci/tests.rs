//! A driver of the controller, as Linux's goes about it.

use super::{Controller, Drive, Identity, Properties, identify::tests::answer};
use crate::{
    Disk, Memory,
    testing::{Fake, Held, Hold, Raised, Ram},
};
use proptest::prelude::*;
use std::{sync::atomic::Ordering, thread};

const LIST: u64 = 0x1000;
const AREA: u64 = 0x2000;
const TABLES: u64 = 0x1_0000;
const DATA: u64 = 0x10_0000;
const SECTORS: u64 = 4096;
/// The port of the disk.
const PORT: u64 = 2;

/// Registers of a port.
const STATUS: u64 = 0x10;
const ENABLE: u64 = 0x14;
const COMMAND: u64 = 0x18;
const TASK_FILE: u64 = 0x20;
const SIGNATURE: u64 = 0x24;
const LINK: u64 = 0x28;
const LINK_CONTROL: u64 = 0x2C;
const LINK_ERROR: u64 = 0x30;
const ACTIVE: u64 = 0x34;
const ISSUE: u64 = 0x38;

struct Driver {
    controller: Controller<Ram, Raised>,
    ram: Ram,
    raised: Raised,
    disk: Fake,
}

/// A command as a driver writes it.
#[derive(Clone, Copy, Default)]
struct Ask {
    opcode: u8,
    sector: u64,
    count: u16,
    features: u16,
    device: u8,
    control: u8,
}

impl Ask {
    fn bytes(self) -> [u8; 20] {
        let (s, c, f) = (self.sector.to_le_bytes(), self.count.to_le_bytes(), self.features.to_le_bytes());
        let kind = if self.control == 0 && self.opcode != 0 { 0x80 } else { 0x0F };
        [
            0x27,
            kind,
            self.opcode,
            f[0],
            s[0],
            s[1],
            s[2],
            self.device,
            s[3],
            s[4],
            s[5],
            f[1],
            c[0],
            c[1],
            0,
            self.control,
            0,
            0,
            0,
            0,
        ]
    }

    fn queued(opcode: u8, sector: u64, sectors: u16, slot: u16) -> Self {
        Self { opcode, sector, features: sectors, count: slot << 3, device: 0x40, ..Self::default() }
    }
}

impl Driver {
    fn new() -> Self {
        Self::with(|disk| Box::new(disk))
    }

    /// Returns a driver whose disk goes through something else.
    fn with(through: impl FnOnce(Fake) -> Box<dyn Disk + Send>) -> Self {
        let (ram, raised, disk) = (Ram::new(4 << 20), Raised::default(), Fake::new(SECTORS as usize * 512));
        let drive = |sectors, disk| Drive::new(Identity::new(&answer(sectors)).unwrap(), disk);
        let other = Box::new(Fake(Fake::new(8 * 512).0, true));
        let drives = vec![(2, drive(SECTORS, through(disk.clone()))), (4, drive(8, other))];
        // Addresses of 64 bits, queued commands, overrides, AHCI alone, 3 Gb/s, 32 slots, six ports.
        let properties = Properties {
            capabilities: 0xC124_1F05,
            more: 0,
            version: 0x0001_0300,
            ports: vec![0x0004_0000; 6],
        };
        let controller = Controller::new(properties, drives, ram.clone(), raised.clone());
        Self { controller, ram, raised, disk }
    }

    fn write(&mut self, offset: u64, value: u32) {
        if self.controller.registers().write(offset, &value.to_le_bytes()) {
            self.controller.work();
        }
    }

    fn read(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.controller.registers().read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn put(&mut self, register: u64, value: u32) {
        self.write(0x100 + PORT * 0x80 + register, value);
    }

    fn get(&self, register: u64) -> u32 {
        self.read(0x100 + PORT * 0x80 + register)
    }

    fn bytes(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.ram.read(at, &mut bytes).unwrap();
        bytes
    }

    /// Returns a driver whose port is up, as Linux's is after it has resumed.
    fn ready() -> Self {
        let mut driver = Self::new();
        driver.resume();
        driver
    }

    /// Returns a driver whose disk hangs, and whose port is up.
    fn held() -> (Self, Hold) {
        let mut hold = None;
        let mut driver = Self::with(|disk| {
            let (held, other) = Held::new(disk);
            hold = Some(other);
            Box::new(held)
        });
        driver.resume();
        (driver, hold.unwrap())
    }

    /// Lets a command for 256 KiB hang, does something meanwhile, and lets the disk go on.
    fn hang(opcode: u8, meanwhile: impl FnOnce(&super::Registers<Raised>)) -> Self {
        let (mut driver, hold) = Self::held();
        driver.ram.write(DATA, &[0xEE; 512 * 512]).unwrap();
        driver.ram.write(AREA + 0x40, &[0xEE; 20]).unwrap();
        driver.disk.0.lock().unwrap().bytes.fill(1);
        let registers = driver.controller.registers();
        let worker = thread::spawn(move || {
            let ask = Ask { opcode, count: 512, ..Ask::default() };
            driver.prepare(3, ask, &[(DATA, 512 * 512)]);
            driver.put(ISSUE, 1 << 3);
            driver
        });
        hold.begun.recv().unwrap();
        meanwhile(&registers);
        drop(hold.goes);
        worker.join().unwrap()
    }

    fn resume(&mut self) {
        let driver = self;
        driver.write(4, 1);
        assert_eq!(driver.read(4), 1 << 31, "the reset is over, and AHCI is the only mode");
        driver.write(4, 1 << 31 | 2);
        driver.put(0, LIST as u32);
        driver.put(8, AREA as u32);
        driver.put(COMMAND, 0x10);
        driver.connect();
        driver.put(ENABLE, 0x7D40_001F);
        driver.start();
    }

    fn connect(&mut self) {
        self.put(LINK_CONTROL, 0x301);
        assert_eq!((self.get(LINK), self.get(TASK_FILE)), (0, 0x7F));
        self.put(LINK_CONTROL, 0x300);
        assert_eq!(self.get(LINK), 0x123);
        assert_eq!(self.get(LINK_ERROR), 0x0401_0000);
        assert_eq!(self.get(STATUS) & 0x0040_0040, 0x0040_0040);
        self.put(LINK_ERROR, !0);
        assert_eq!((self.get(TASK_FILE), self.get(SIGNATURE)), (0x150, 0x101));
        assert_eq!(self.bytes(AREA + 0x40, 5), [0x34, 0, 0x50, 1, 1]);
    }

    fn start(&mut self) {
        self.put(COMMAND, 0x11);
        assert_eq!(self.get(COMMAND), 0x0004_C011, "it runs, and receives");
    }

    fn restart(&mut self) {
        self.put(COMMAND, 0x10);
        assert_eq!(self.get(COMMAND) & 0x8000, 0);
        assert_eq!((self.get(ISSUE), self.get(ACTIVE)), (0, 0));
        self.put(STATUS, !0);
        self.start();
    }

    /// Writes a command with its data's ranges to a slot.
    fn prepare(&mut self, slot: u64, ask: Ask, ranges: &[(u64, u32)]) {
        let table = TABLES + slot * 0x1000;
        let words = [5 | (ranges.len() as u32) << 16, 0, table as u32, 0];
        self.ram.write(LIST + slot * 32, &words.map(u32::to_le_bytes).concat()).unwrap();
        self.ram.write(table, &ask.bytes()).unwrap();
        for ((start, length), at) in ranges.iter().zip((table + 0x80..).step_by(16)) {
            let words = [*start as u32, (start >> 32) as u32, 0, length - 1];
            self.ram.write(at, &words.map(u32::to_le_bytes).concat()).unwrap();
        }
    }

    /// Executes a command that is not queued. Returns the event and the task file.
    fn ask(&mut self, ask: Ask, ranges: &[(u64, u32)]) -> (u32, u32) {
        self.prepare(3, ask, ranges);
        self.put(ISSUE, 1 << 3);
        let ended = (self.get(STATUS), self.get(TASK_FILE));
        self.put(STATUS, !0);
        self.write(8, !0);
        ended
    }

    fn command(&mut self, opcode: u8, sector: u64, count: u16, length: u32) -> (u32, u32) {
        let ask = Ask { opcode, sector, count, ..Ask::default() };
        let range = [(DATA, length)];
        self.ask(ask, if length == 0 { &[] } else { &range })
    }

    fn copied(&self) -> u32 {
        let bytes = self.bytes(LIST + 3 * 32 + 4, 4);
        u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
}

const DONE: (u32, u32) = (1, 0x50);
const ABORTED: (u32, u32) = (1 << 30 | 1, 0x451);
const NOT_FOUND: (u32, u32) = (1 << 30 | 1, 0x1051);

#[test]
fn a_driver_that_resumes_finds_the_disk_and_empty_ports() {
    let mut driver = Driver::ready();
    assert_eq!((driver.read(0), driver.read(0xC), driver.read(0x10)), (0xC124_1F05, 0x3F, 0x1_0300));
    driver.write(0xC, 0x3D);
    assert_eq!(driver.read(0xC), 0x3D);
    for empty in [0, 1, 3, 5] {
        let port = 0x100 + empty * 0x80;
        assert_eq!((driver.read(port + LINK), driver.read(port + TASK_FILE)), (0, 0x7F));
        driver.write(port + LINK_CONTROL, 0x301);
        driver.write(port + LINK_CONTROL, 0x300);
        assert_eq!((driver.read(port + LINK), driver.read(port + LINK_ERROR)), (0, 0));
    }
    assert_eq!(driver.read(0x100 + 6 * 0x80 + LINK), 0);
    // The disk that only waits for its port to receive.
    assert_eq!(driver.read(0x100 + 4 * 0x80 + TASK_FILE), 0x80);
    assert_eq!(driver.command(0xEC, 0, 0, 512), (2, 0x50));
    assert_eq!(driver.copied(), 512);
    let found = driver.bytes(DATA, 512);
    assert_eq!((&found[20..28], &found[54..62]), (b"ESIRLA  ".as_slice(), b" AOMED L".as_slice()));
    assert_eq!(driver.bytes(AREA + 0x20, 3), [0x5F, 0x60, 0x58]);
    assert_eq!(driver.bytes(AREA + 0x2F, 3), [0x50, 0, 2]);
    for ask in [
        Ask { opcode: 0xEF, features: 3, count: 0x46, ..Ask::default() },
        Ask { opcode: 0xE5, ..Ask::default() },
        Ask { opcode: 0x40, count: 1, device: 0x40, ..Ask::default() },
        Ask { opcode: 0xE0, ..Ask::default() },
    ] {
        assert_eq!(driver.ask(ask, &[]), DONE, "{:#x}", ask.opcode);
        let active = if ask.opcode == 0xE5 { 0xFF } else { 0 };
        assert_eq!(driver.bytes(AREA + 0x4C, 1), [active]);
    }
    assert_eq!(driver.disk.0.lock().unwrap().log, ["flush 0 0"]);
}

#[test]
fn a_reset_by_the_control_register_ends_with_the_signature() {
    let mut driver = Driver::ready();
    driver.ram.write(AREA + 0x40, &[0; 20]).unwrap();
    driver.ask(Ask { control: 4, ..Ask::default() }, &[]);
    assert_eq!((driver.get(ISSUE), driver.get(TASK_FILE) & 0x80), (0, 0x80));
    driver.ask(Ask::default(), &[]);
    assert_eq!((driver.get(ISSUE), driver.get(TASK_FILE)), (0, 0x150));
    assert_eq!(driver.bytes(AREA + 0x40, 5), [0x34, 0, 0x50, 1, 1]);
    assert_eq!(driver.command(0xE5, 0, 0, 0), DONE);
    // Busy without a reset, after an override.
    driver.ask(Ask { control: 4, ..Ask::default() }, &[]);
    driver.put(COMMAND, 0x10);
    driver.put(COMMAND, 0x18);
    assert_eq!(driver.get(TASK_FILE) & 0x88, 0);
}

#[test]
fn blocks_are_written_read_forced_and_flushed() {
    let mut driver = Driver::ready();
    let pattern: Vec<u8> = (0..8 * 512).map(|at| (at % 251) as u8).collect();
    driver.ram.write(DATA, &pattern).unwrap();
    // In ranges of odd places.
    let ranges = [(DATA, 1000), (DATA + 1000, 96), (DATA + 1096, 3000)];
    let ask = Ask { opcode: 0x35, sector: 100, count: 8, device: 0x40, ..Ask::default() };
    assert_eq!(driver.ask(ask, &ranges), DONE);
    assert_eq!(driver.copied(), 8 * 512);
    assert_eq!(driver.disk.0.lock().unwrap().bytes[100 * 512..108 * 512], pattern);
    for (opcode, ended) in [(0x25, DONE), (0xC8, DONE), (0x24, (2, 0x50)), (0x20, (2, 0x50))] {
        driver.ram.write(DATA, &[0; 8 * 512]).unwrap();
        assert_eq!(driver.command(opcode, 100, 8, 8 * 512), ended, "{opcode:#x}");
        assert_eq!(driver.bytes(DATA, 8 * 512), pattern);
    }
    driver.disk.0.lock().unwrap().log.clear();
    for opcode in [0x3D, 0xCA, 0xE7, 0xEA] {
        let length = if opcode >= 0xE0 { 0 } else { 512 };
        assert_eq!(driver.command(opcode, 7, 1, length), DONE);
    }
    driver.ask(Ask { opcode: 0xEF, features: 0x82, ..Ask::default() }, &[]);
    assert_eq!(driver.command(0x30, 9, 1, 512), DONE);
    let log = std::mem::take(&mut driver.disk.0.lock().unwrap().log);
    let (write, flush) = ("write 3584 512", "flush 0 0");
    assert_eq!(log, [write, flush, write, flush, flush, flush, "write 4608 512", flush]);
    driver.command(0xEC, 0, 0, 512);
    assert_eq!(driver.bytes(DATA + 170, 1)[0] & 0x20, 0, "the cache is off");
}

#[test]
fn queued_commands_end_by_their_bits() {
    let mut driver = Driver::ready();
    for slot in [0_u64, 5, 31] {
        let ask = Ask::queued(0x61, slot, 1, slot as u16);
        driver.ram.write(DATA + slot * 512, &[slot as u8 + 1; 512]).unwrap();
        driver.prepare(slot, ask, &[(DATA + slot * 512, 512)]);
    }
    let all = 1 | 1 << 5 | 1 << 31;
    driver.put(ACTIVE, all);
    assert_eq!(driver.get(ACTIVE), all);
    driver.put(ISSUE, all);
    assert_eq!((driver.get(ACTIVE), driver.get(ISSUE)), (0, 0));
    assert_eq!((driver.get(STATUS), driver.get(TASK_FILE)), (8, 0x50));
    assert_eq!(driver.bytes(AREA + 0x58, 8), [0xA1, 0x40, 0x50, 0, 0, 0, 0, 0x80]);
    let content = driver.disk.0.lock().unwrap().bytes.clone();
    assert_eq!([0, 5, 31].map(|sector| content[sector * 512]), [1, 6, 32]);
    assert_eq!(*driver.raised.0.lock().unwrap(), [2, 2, 2]);
    // A forced write, and the largest read that fits.
    driver.disk.0.lock().unwrap().log.clear();
    let ask = Ask { device: 0xC0, ..Ask::queued(0x61, 1, 1, 0) };
    driver.prepare(0, ask, &[(DATA, 512)]);
    driver.prepare(1, Ask::queued(0x60, 0, SECTORS as u16, 1), &[(DATA, SECTORS as u32 * 512)]);
    driver.put(ACTIVE, 3);
    driver.put(ISSUE, 3);
    assert_eq!((driver.get(ACTIVE), driver.get(TASK_FILE)), (0, 0x50));
    assert_eq!(driver.disk.0.lock().unwrap().log[..2], ["write 512 512", "flush 0 0"]);
}

#[test]
fn a_queued_command_that_fails_is_named_by_the_log() {
    let mut driver = Driver::ready();
    driver.prepare(7, Ask::queued(0x60, 0x1234, 8, 7), &[(DATA, 4096)]);
    driver.prepare(9, Ask::queued(0x60, 0, 8, 9), &[(DATA, 4096)]);
    driver.put(ACTIVE, 1 << 7 | 1 << 9);
    driver.put(ISSUE, 1 << 7 | 1 << 9);
    // The sector is beyond the end. The port halts, and the other command waits.
    assert_eq!((driver.get(TASK_FILE), driver.get(STATUS)), (0x1051, 1 << 30 | 8));
    assert_eq!((driver.get(ACTIVE), driver.get(ISSUE)), (1 << 7 | 1 << 9, 1 << 9));
    assert_eq!(driver.bytes(AREA + 0x58, 8), [0xA1, 0x40, 0x51, 0x10, 0, 0, 0, 0]);
    driver.restart();
    assert_eq!(driver.command(0x2F, 0x10, 1, 512), (2, 0x50));
    let page = driver.bytes(DATA, 512);
    assert_eq!(page[..11], [7, 0, 0x51, 0x10, 0x34, 0x12, 0, 0x40, 0, 0, 0]);
    assert_eq!(page.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0);
    driver.command(0x2F, 0x10, 1, 512);
    assert_eq!(driver.bytes(DATA, 1), [0x80], "it was forgotten");
    for (log, at, value) in [(0, 0x20, 1), (0, 0x60, 1), (0x30, 8, 1), (0, 0x24, 0)] {
        assert_eq!(driver.command(0x2F, log, 1, 512), (2, 0x50));
        assert_eq!(driver.bytes(DATA + at, 1), [value], "{log} {at}");
    }
    assert_eq!(driver.command(0x2F, 0x11, 1, 512), ABORTED);
}

#[test]
fn errors_halt_the_port_until_it_is_started_again() {
    let mut driver = Driver::ready();
    let mut fails = |opcode, sector, count, expected| {
        assert_eq!(driver.command(opcode, sector, count, 0x4_0000), expected, "{opcode:#x}");
        assert_eq!(driver.get(ISSUE), 1 << 3, "the command stays");
        assert_eq!(driver.command(0xE5, 0, 0, 0).0, 0, "the port is halted");
        driver.restart();
    };
    // Multiple, packet, SMART, security, an unknown one.
    for opcode in [0xC4, 0xA0, 0xB0, 0xF6, 0x01, 0xFF] {
        fails(opcode, 0, 1, ABORTED);
    }
    fails(0x25, SECTORS, 1, NOT_FOUND);
    fails(0x35, SECTORS - 1, 2, NOT_FOUND);
    fails(0x25, 0xFFFF_FFFF_FFFF, 0, NOT_FOUND);
    fails(0x2F, 0x0100, 1, ABORTED);
    driver.disk.0.lock().unwrap().fails = Some(libc::EIO);
    assert_eq!(driver.command(0x25, 0, 1, 512), (1 << 30 | 1, 0x4051));
    driver.restart();
    assert_eq!(driver.command(0x35, 0, 1, 512), NOT_FOUND);
    driver.restart();
    driver.disk.0.lock().unwrap().fails = Some(libc::EROFS);
    assert_eq!(driver.command(0x35, 0, 1, 512), (1 << 30 | 1, 0x4051));
    driver.restart();
    driver.disk.0.lock().unwrap().fails = Some(libc::EIO);
    assert_eq!(driver.command(0xEA, 0, 0, 0), NOT_FOUND);
    assert!(driver.controller.finish().unwrap_err().contains("port 2"));
}

#[test]
fn data_that_is_nowhere_fails_the_port_and_not_the_disk() {
    let mut driver = Driver::ready();
    let read = Ask { opcode: 0x25, count: 8, ..Ask::default() };
    for (ranges, event) in [
        ([(DATA, 512)].as_slice(), 1 << 24),
        (&[], 1 << 24),
        (&[(3 << 40, 4096)], 1 << 29),
        (&[(u64::MAX - 7, 4096)], 1 << 29),
        (&[((4 << 20) - 512, 4096)], 1 << 29),
    ] {
        assert_eq!(driver.ask(read, ranges).0, event);
        driver.restart();
    }
    // A list or a table that is nowhere, and a command that is none.
    driver.prepare(3, read, &[(DATA, 4096)]);
    driver.ram.write(LIST + 3 * 32 + 12, &[0xFF; 4]).unwrap();
    driver.put(ISSUE, 1 << 3);
    assert_eq!(driver.get(STATUS), 1 << 29);
    driver.restart();
    driver.prepare(3, read, &[(DATA, 4096)]);
    driver.ram.write(TABLES + 3 * 0x1000, &[0x34]).unwrap();
    driver.put(ISSUE, 1 << 3);
    assert_eq!(driver.get(STATUS), 1 << 27);
    driver.restart();
    driver.put(4, 0xFFFF_FFFF);
    driver.put(ISSUE, 1);
    assert_eq!(driver.get(STATUS), 1 << 29);
    driver.put(4, 0);
    driver.restart();
    assert_eq!(driver.ask(read, &[(DATA, 4096)]), DONE);
}

#[test]
fn a_disk_that_is_only_read_refuses_writes() {
    let mut driver = Driver::ready();
    let port = 0x100 + 4 * 0x80;
    for (register, value) in [(0, LIST), (8, AREA), (COMMAND, 0x11)] {
        driver.write(port + register, value as u32);
    }
    let mut ask = |opcode| {
        driver.prepare(0, Ask { opcode, count: 1, features: 1, ..Ask::default() }, &[(DATA, 512)]);
        driver.write(port + ISSUE, 1);
        let task_file = driver.read(port + TASK_FILE);
        driver.write(port + COMMAND, 0x10);
        driver.write(port + COMMAND, 0x11);
        task_file
    };
    assert_eq!([0x25, 0x35, 0x06, 0xE7, 0x25].map(&mut ask), [0x50, 0x4051, 0x4051, 0x50, 0x50]);
}

#[test]
fn trimmed_ranges_read_as_zeros_if_the_disk_has_promised_it() {
    let mut driver = Driver::ready();
    let entry = |sector: u64, count: u64| (sector | count << 48).to_le_bytes();
    driver.ram.write(DATA, &[entry(16, 8), entry(99, 0), entry(4095, 1)].concat()).unwrap();
    let trim = Ask { opcode: 6, features: 1, count: 1, ..Ask::default() };
    assert_eq!(driver.ask(trim, &[(DATA, 512)]), DONE);
    let log = std::mem::take(&mut driver.disk.0.lock().unwrap().log);
    assert_eq!(log, ["zero 8192 4096", "zero 2096640 512"]);
    driver.ram.write(DATA + 8, &entry(4095, 2)).unwrap();
    assert_eq!(driver.ask(trim, &[(DATA, 512)]), NOT_FOUND);
    assert!(driver.disk.0.lock().unwrap().log.is_empty(), "none was given up");
    driver.restart();
    for wrong in [Ask { features: 0, ..trim }, Ask { count: 9, ..trim }, Ask { count: 0, ..trim }] {
        assert_eq!(driver.ask(wrong, &[(DATA, 512)]), ABORTED);
        driver.restart();
    }
}

#[test]
fn interrupts_follow_the_status_and_both_enables() {
    let mut driver = Driver::ready();
    let line = |driver: &Driver| driver.raised.1.load(Ordering::Relaxed);
    let messages = |driver: &Driver| std::mem::take(&mut *driver.raised.0.lock().unwrap());
    driver.prepare(0, Ask { opcode: 0xE5, ..Ask::default() }, &[]);
    driver.put(ISSUE, 1);
    assert_eq!((driver.read(8), line(&driver), messages(&driver)), (1 << 2, true, vec![2]));
    // Cleared before its cause, it comes again.
    driver.write(8, 1 << 2);
    assert_eq!((driver.read(8), line(&driver), messages(&driver)), (1 << 2, true, vec![2]));
    driver.put(STATUS, 1);
    driver.write(8, 1 << 2);
    assert_eq!((driver.read(8), line(&driver), messages(&driver)), (0, false, vec![]));
    driver.put(ENABLE, 0);
    driver.put(ISSUE, 1);
    assert_eq!((driver.read(8), line(&driver)), (0, false));
    driver.put(ENABLE, 1);
    assert_eq!((driver.read(8), line(&driver), messages(&driver)), (1 << 2, true, vec![2]));
    driver.write(4, 1 << 31);
    assert!(!line(&driver));
    driver.write(4, 1 << 31 | 2);
    assert_eq!((line(&driver), messages(&driver)), (true, vec![2]));
    driver.controller.registers().reset();
    driver.controller.work();
    assert_eq!((line(&driver), driver.read(8), driver.get(ENABLE)), (false, 0, 0));
}

#[test]
fn a_command_of_a_port_that_was_stopped_leaves_no_trace() {
    let mut driver = Driver::ready();
    driver.prepare(0, Ask { opcode: 0xE5, ..Ask::default() }, &[]);
    let registers = driver.controller.registers();
    let write = |register: u64, value: u32| {
        registers.write(0x100 + PORT * 0x80 + register, &value.to_le_bytes());
    };
    write(ISSUE, 1);
    write(COMMAND, 0x10);
    write(COMMAND, 0x11);
    driver.controller.work();
    assert_eq!((driver.get(STATUS), driver.get(ISSUE)), (0, 0));
    // While a command is executed its port runs on.
    registers.values().ports[PORT as usize].is_at_work = true;
    write(COMMAND, 0);
    assert_eq!(driver.get(COMMAND) & 0xC000, 0xC000);
    driver.write(4, 1);
    assert_eq!(driver.get(COMMAND) & 0xC000, 0xC000);
    registers.values().ports[PORT as usize].is_at_work = false;
    assert_eq!(driver.get(COMMAND) & 0xC000, 0);
}

/// A reset of the link, a stop of the port, a reset of the controller, one of the function, and the end of
/// its leave to reach memory.
const TAKES_MEMORY: [fn(&super::Registers<Raised>); 6] = [
    |registers| {
        for value in [0x301_u32, 0x300] {
            registers.write(0x100 + PORT * 0x80 + LINK_CONTROL, &value.to_le_bytes());
        }
    },
    |registers| {
        registers.write(0x100 + PORT * 0x80 + COMMAND, &[0x10, 0, 0, 0]);
    },
    |registers| assert!(registers.write(4, &0x8000_0001_u32.to_le_bytes())),
    |registers| registers.reset(),
    |registers| registers.set_master(false),
    |registers| {
        registers.set_master(false);
        registers.set_master(true);
    },
];

/// Linux frees the pages of a command when it has reset the link, or given the disk up.
#[test]
fn a_read_that_hangs_reaches_no_memory_after_a_reset() {
    for (at, takes) in TAKES_MEMORY.into_iter().enumerate() {
        let mut driver = Driver::hang(0x25, takes);
        assert!(driver.bytes(DATA, 512 * 512) == [0xEE; 512 * 512], "{at}");
        // After a reset of the link there is a signature.
        let ends = driver.bytes(AREA + 0x40, 20);
        assert!(at == 0 || ends == [0xEE; 20], "{at}");
        if at >= 4 {
            assert_eq!(driver.get(STATUS), 1 << 29, "{at}: the driver learns of it");
            assert_eq!(driver.get(ISSUE), 1 << 3, "{at}");
        }
        driver.controller.registers().set_master(true);
        driver.resume();
        assert_eq!(driver.command(0x25, 0, 512, 512 * 512), DONE, "{at}");
        assert!(driver.bytes(DATA, 512 * 512) == [1; 512 * 512], "{at}");
    }
    let driver = Driver::hang(0x25, |_| ());
    assert!(driver.bytes(DATA, 512 * 512) == [1; 512 * 512], "without a reset it ends");
}

#[test]
fn a_write_that_hangs_writes_no_freed_memory_after_a_reset() {
    for (at, takes) in TAKES_MEMORY.into_iter().enumerate() {
        let driver = Driver::hang(0x35, takes);
        let content = &driver.disk.0.lock().unwrap().bytes;
        assert!(content[256 * 512..].iter().all(|byte| *byte == 1), "{at}");
    }
    let driver = Driver::hang(0x35, |_| ());
    assert!(driver.disk.0.lock().unwrap().bytes[..512 * 512] == [0xEE; 512 * 512]);
}

/// Linux reports lost writes once: to a flush whose driver has given it up.
#[test]
fn a_flush_that_a_reset_has_ended_fails_the_next_one() {
    let (mut driver, hold) = Driver::held();
    let registers = driver.controller.registers();
    driver.disk.0.lock().unwrap().fails = Some(libc::EIO);
    let disk = driver.disk.clone();
    let worker = thread::spawn(move || {
        driver.prepare(3, Ask { opcode: 0xEA, ..Ask::default() }, &[]);
        driver.put(ISSUE, 1 << 3);
        driver
    });
    hold.begun.recv().unwrap();
    TAKES_MEMORY[0](&registers);
    drop(hold.goes);
    let mut driver = worker.join().unwrap();
    disk.0.lock().unwrap().fails = None;
    driver.resume();
    assert!(driver.controller.finish().unwrap_err().contains("port 2"));
    assert_eq!(driver.command(0xEA, 0, 0, 0), NOT_FOUND);
    driver.restart();
    assert_eq!(driver.command(0xEA, 0, 0, 0), DONE);
    driver.controller.finish().unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// What is written anywhere is read there, whatever the ranges, and nothing else changes.
    #[test]
    fn bytes_come_back_through_any_ranges(
        sector in 0_u64..SECTORS - 64,
        count in 1_u16..64,
        cuts in proptest::collection::vec(1_u32..4000, 0..12),
        queued in any::<bool>(),
    ) {
        let mut driver = Driver::ready();
        let length = u32::from(count) * 512;
        let mut ranges = Vec::new();
        let mut rest = length;
        for cut in cuts.iter().copied().chain([length]) {
            let part = cut.min(rest);
            if part > 0 {
                ranges.push((DATA + 0x8000 * ranges.len() as u64, part));
            }
            rest -= part;
        }
        let pattern: Vec<u8> = (0..length).map(|at| (at % 241) as u8 + 1).collect();
        let mut from = pattern.as_slice();
        for (start, part) in &ranges {
            let (now, later) = from.split_at(*part as usize);
            driver.ram.write(*start, now).unwrap();
            from = later;
        }
        let ask = |read: bool| match queued {
            true => Ask::queued(if read { 0x60 } else { 0x61 }, sector, count, 3),
            false => Ask { opcode: if read { 0x25 } else { 0x35 }, sector, count, ..Ask::default() },
        };
        prop_assert_eq!(driver.ask(ask(false), &ranges).1, 0x50);
        let content = driver.disk.0.lock().unwrap().bytes.clone();
        let place = sector as usize * 512..sector as usize * 512 + length as usize;
        prop_assert_eq!(&content[place.clone()], &pattern);
        let outside = content.iter().enumerate().filter(|(at, byte)| !place.contains(at) && **byte != 0);
        prop_assert_eq!(outside.count(), 0);
        for (start, part) in &ranges {
            driver.ram.write(*start, &vec![0; *part as usize]).unwrap();
        }
        prop_assert_eq!(driver.ask(ask(true), &ranges).1, 0x50);
        let back: Vec<u8> =
            ranges.iter().flat_map(|(start, part)| driver.bytes(*start, *part as usize)).collect();
        prop_assert_eq!(back, pattern);
    }
}
