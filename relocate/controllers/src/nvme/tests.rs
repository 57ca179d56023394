//! A driver of the controller, as Linux's goes about it.

use super::{Controller, Identity, Limits, Namespace, identify::tests as structures};
use crate::{
    Disk, Memory,
    testing::{Fake, Held, Hold, Raised, Ram},
};
use proptest::prelude::*;
use std::thread;

const ADMIN: [u64; 2] = [0x1_0000, 0x1_1000];
const QUEUES: [u64; 2] = [0x2_0000, 0x3_0000];
const LIST: u64 = 0x4_0000;
const DATA: u64 = 0x10_0000;
const BLOCKS: u64 = 4096;

struct Driver {
    controller: Controller<Ram, Raised>,
    ram: Ram,
    raised: Raised,
    disk: Fake,
    /// Tails of submissions, heads of completions and their phases, of two pairs of eight entries.
    tails: [u16; 2],
    heads: [u16; 2],
    phases: [u16; 2],
    identifier: u16,
}

/// Status and value of a command's end.
type Ended = (u16, u32);

impl Driver {
    fn new() -> Self {
        Self::with(|disk| Box::new(disk))
    }

    /// Returns a driver whose disk goes through something else.
    fn with(through: impl FnOnce(Fake) -> Box<dyn Disk + Send>) -> Self {
        let (ram, raised, disk) = (Ram::new(4 << 20), Raised::default(), Fake::new(BLOCKS as usize * 512));
        let other = Box::new(Fake(Fake::new(8 * 512).0, true));
        let namespaces = vec![
            Namespace::new(1, &structures::namespace(BLOCKS), &[1, 8], through(disk.clone())).unwrap(),
            Namespace::new(7, &structures::namespace(8), &[], other).unwrap(),
        ];
        let identity = Identity::new(&structures::controller()).unwrap();
        let limits = Limits { pairs: 4, entries: 64, vectors: 3 };
        let controller = Controller::new(identity, namespaces, limits, ram.clone(), raised.clone());
        let (tails, heads, phases) = ([0; 2], [0; 2], [1; 2]);
        Self { controller, ram, raised, disk, tails, heads, phases, identifier: 0 }
    }

    fn write(&mut self, offset: u64, value: u32) {
        if self.controller.registers().write(offset, &value.to_le_bytes()) {
            self.controller.work();
        }
    }

    fn status(&self) -> u32 {
        let mut bytes = [0; 4];
        self.controller.registers().read(0x1C, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn enable(&mut self) {
        self.write(0x24, 7 | 7 << 16);
        for (offset, value) in [(0x28, ADMIN[0]), (0x30, ADMIN[1])] {
            self.controller.registers().write(offset, &value.to_le_bytes());
        }
        self.write(0x14, 0x0046_0001);
        (self.tails, self.heads, self.phases) = ([0; 2], [0; 2], [1; 2]);
        for queue in [ADMIN[1], QUEUES[1]] {
            self.ram.write(queue, &[0; 8 * 16]).unwrap();
        }
    }

    /// Returns a driver whose controller is on, with a pair of queues.
    fn ready() -> Self {
        let mut driver = Self::new();
        driver.enable();
        driver.make_queues();
        driver
    }

    /// Returns a driver whose disk hangs, with a pair of queues.
    fn held() -> (Self, Hold) {
        let mut hold = None;
        let mut driver = Self::with(|disk| {
            let (held, other) = Held::new(disk);
            hold = Some(other);
            Box::new(held)
        });
        driver.enable();
        driver.make_queues();
        (driver, hold.unwrap())
    }

    fn make_queues(&mut self) {
        let driver = self;
        assert_eq!(driver.status(), 1);
        assert_eq!(driver.admin(9, 0, [7, 0x0007_0007, 0], 0), (0, 0x0003_0003));
        assert_eq!(driver.admin(5, 0, [0x0007_0001, 2 << 16 | 3, 0], QUEUES[1]), (0, 0));
        assert_eq!(driver.admin(1, 0, [0x0007_0001, 1 << 16 | 1, 0], QUEUES[0]), (0, 0));
    }

    /// Lets a read or a write of 256 KiB hang, does something meanwhile, and lets the disk go on.
    fn hang(opcode: u8, meanwhile: impl FnOnce(&super::Registers)) -> Self {
        let (mut driver, hold) = Self::held();
        driver.ram.write(DATA, &[0xEE; 512 * 512]).unwrap();
        driver.disk.0.lock().unwrap().bytes.fill(1);
        driver.raised.0.lock().unwrap().clear();
        let registers = driver.controller.registers();
        let worker = thread::spawn(move || {
            driver.submit(1, opcode, 1, driver.pages(512), [0, 0, 511]);
            driver
        });
        hold.begun.recv().unwrap();
        meanwhile(&registers);
        drop(hold.goes);
        worker.join().unwrap()
    }

    fn submit(&mut self, queue: usize, opcode: u8, namespace: u32, pages: [u64; 2], words: [u32; 3]) {
        self.identifier += 1;
        let mut command = [0_u32; 16];
        command[0] = u32::from(opcode) | u32::from(self.identifier) << 16;
        command[1] = namespace;
        for (at, page) in [(6, pages[0]), (8, pages[1])] {
            (command[at], command[at + 1]) = (page as u32, (page >> 32) as u32);
        }
        command[10..13].copy_from_slice(&words);
        let start = [ADMIN[0], QUEUES[0]][queue] + u64::from(self.tails[queue]) * 64;
        self.ram.write(start, &command.map(u32::to_le_bytes).concat()).unwrap();
        self.tails[queue] = (self.tails[queue] + 1) % 8;
        self.write(0x1000 + queue as u64 * 8, self.tails[queue].into());
    }

    /// Returns identifier, status and value of the next end, if it has come.
    fn end(&mut self, queue: usize) -> Option<(u16, Ended)> {
        let mut bytes = [0; 16];
        let start = [ADMIN[1], QUEUES[1]][queue] + u64::from(self.heads[queue]) * 16;
        self.ram.read(start, &mut bytes).unwrap();
        let [value, _, _, last] = [0, 4, 8, 12]
            .map(|at| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]));
        let field = (last >> 16) as u16;
        if field & 1 != self.phases[queue] {
            return None;
        }
        self.heads[queue] = (self.heads[queue] + 1) % 8;
        self.phases[queue] ^= u16::from(self.heads[queue] == 0);
        self.write(0x1004 + queue as u64 * 8, self.heads[queue].into());
        Some((last as u16, (field >> 1 & 0x7FF, value)))
    }

    fn command(
        &mut self,
        queue: usize,
        opcode: u8,
        namespace: u32,
        pages: [u64; 2],
        words: [u32; 3],
    ) -> Ended {
        self.submit(queue, opcode, namespace, pages, words);
        let (identifier, ended) = self.end(queue).expect("an end");
        assert_eq!(identifier, self.identifier);
        ended
    }

    fn admin(&mut self, opcode: u8, namespace: u32, words: [u32; 3], page: u64) -> Ended {
        self.command(0, opcode, namespace, [page, 0], words)
    }

    /// Reads or writes blocks with data in pages one after the other.
    fn io(&mut self, opcode: u8, first: u64, count: u32) -> Ended {
        self.command(1, opcode, 1, self.pages(count), [first as u32, (first >> 32) as u32, count - 1])
    }

    fn pages(&self, count: u32) -> [u64; 2] {
        for page in 0..512 {
            self.ram.write(LIST + page * 8, &(DATA + (page + 1) * 4096).to_le_bytes()).unwrap();
        }
        [DATA, if count <= 16 { DATA + 4096 } else { LIST }]
    }

    fn log(&self) -> Vec<String> {
        std::mem::take(&mut self.disk.0.lock().unwrap().log)
    }

    fn bytes(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.ram.read(at, &mut bytes).unwrap();
        bytes
    }
}

#[test]
fn a_driver_finds_the_controller_and_its_namespaces() {
    let mut driver = Driver::ready();
    assert_eq!(driver.admin(6, 0, [1, 0, 0], DATA), (0, 0));
    assert_eq!(driver.bytes(DATA + 24, 8), b"Fast SSD");
    assert_eq!(driver.admin(6, 0, [2, 0, 0], DATA), (0, 0));
    assert_eq!(driver.bytes(DATA, 12), [1, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(driver.admin(6, 1, [2, 0, 0], DATA), (0, 0));
    assert_eq!(driver.bytes(DATA, 8), [7, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(driver.admin(6, 1, [0, 0, 0], DATA), (0, 0));
    assert_eq!(driver.bytes(DATA, 8), BLOCKS.to_le_bytes());
    assert_eq!(driver.admin(6, 2, [0, 0, 0], DATA), (0, 0));
    assert_eq!(driver.bytes(DATA, 8), [0; 8]);
    assert_eq!(driver.admin(6, 1, [3, 0, 0], DATA), (0, 0));
    assert_eq!(driver.bytes(DATA, 3), [1, 8, 0]);
    assert_eq!(driver.admin(6, 0, [6, 0, 0], DATA), (0, 0));
    for (namespace, words, status) in [
        (2, [3, 0, 0], 0x0B),
        (0, [0, 0, 0], 0x0B),
        (u32::MAX, [2, 0, 0], 0x0B),
        (0, [6, 1 << 24, 0], 2),
        (0, [8, 0, 0], 2),
    ] {
        assert_eq!(driver.admin(6, namespace, words, DATA).0, status, "{namespace} {words:?}");
    }
    assert_eq!(driver.admin(6, 0, [1, 0, 0], 0x40_0000).0, 4, "there is no memory");
    assert!(driver.raised.0.lock().unwrap().iter().all(|vector| *vector == 0));
}

#[test]
fn blocks_are_written_and_read_through_pages_and_lists() {
    let mut driver = Driver::ready();
    for (first, count) in [(0, 1), (8, 8), (16, 16), (100, 17), (1000, 1024), (BLOCKS - 1, 1)] {
        let bytes: Vec<u8> = (0..count * 512).map(|at| (at / 512 + at) as u8).collect();
        driver.ram.write(DATA, &bytes).unwrap();
        assert_eq!(driver.io(1, first, count), (0, 0));
        driver.ram.write(DATA, &vec![0xEE; bytes.len() + 512]).unwrap();
        assert_eq!(driver.io(2, first, count), (0, 0));
        assert_eq!(driver.bytes(DATA, bytes.len()), bytes, "{first} {count}");
        assert_eq!(driver.bytes(DATA + bytes.len() as u64, 512), [0xEE; 512]);
    }
    assert_eq!(driver.raised.0.lock().unwrap().last(), Some(&2), "the queue's own vector");
    let log = driver.log();
    assert_eq!(log[0], "write 0 512");
    assert!(!log.contains(&"flush 0 0".to_owned()), "nobody asked for it");
    // A megabyte is more than the controller permits.
    assert_eq!(driver.io(2, 0, 2048).0, 2);
}

#[test]
fn commands_out_of_range_and_for_nothing_are_refused_without_an_effect() {
    let mut driver = Driver::ready();
    driver.log();
    assert_eq!(driver.io(1, BLOCKS, 1).0, 0x80);
    assert_eq!(driver.io(2, u64::MAX, 2).0, 0x80);
    assert_eq!(driver.io(1, BLOCKS - 1, 2).0, 0x80);
    assert_eq!(driver.command(1, 2, 3, [DATA, 0], [0; 3]).0, 0x0B);
    assert_eq!(driver.command(1, 0x0D, 1, [DATA, 0], [0; 3]).0, 1);
    assert_eq!(driver.command(1, 1, 7, [DATA, 0], [0; 3]).0, 0x20, "it is read-only");
    assert_eq!(driver.command(1, 2, 7, [DATA, 0], [0; 3]).0, 0);
    assert_eq!(driver.log(), [""; 0]);
    for (opcode, words) in [(0x80, [0; 3]), (0x10, [0; 3])] {
        assert_eq!(driver.admin(opcode, 1, words, DATA).0, 1);
    }
}

#[test]
fn writes_last_when_the_driver_wants_it() {
    let mut driver = Driver::ready();
    driver.log();
    assert_eq!(driver.command(1, 0, 1, [0; 2], [0; 3]), (0, 0));
    assert_eq!(driver.command(1, 0, u32::MAX, [0; 2], [0; 3]), (0, 0));
    assert_eq!(driver.log(), ["flush 0 0", "flush 0 0"]);
    let forced = 1 << 30;
    assert_eq!(driver.command(1, 1, 1, [DATA, 0], [0, 0, forced]), (0, 0));
    assert_eq!(driver.log(), ["write 0 512", "flush 0 0"]);
    assert_eq!(driver.admin(9, 0, [6, 0, 0], 0), (0, 0));
    assert_eq!(driver.admin(0x0A, 0, [6, 0, 0], 0), (0, 0));
    assert_eq!(driver.io(1, 0, 1), (0, 0));
    assert_eq!(driver.log(), ["flush 0 0", "write 0 512", "flush 0 0"]);
    // An orderly end.
    driver.write(0x14, 0x0046_4001);
    assert_eq!(driver.status() & 0xC, 8);
    assert_eq!(driver.log(), ["flush 0 0"]);
    driver.controller.finish().unwrap();
    assert_eq!(driver.log(), ["flush 0 0"]);
}

#[test]
fn ranges_are_zeroed_and_given_up() {
    let mut driver = Driver::ready();
    driver.ram.write(DATA, &[7; 4096]).unwrap();
    assert_eq!(driver.io(1, 16, 8), (0, 0));
    driver.log();
    assert_eq!(driver.command(1, 8, 1, [0; 2], [17, 0, 1]), (0, 0));
    let range =
        |blocks: u32, first: u64| [[0; 4].as_slice(), &blocks.to_le_bytes(), &first.to_le_bytes()].concat();
    driver.ram.write(DATA, &[range(4, 100), range(0, 0), range(1, 200)].concat()).unwrap();
    assert_eq!(driver.command(1, 9, 1, [DATA, 0], [2, 4, 0]), (0, 0));
    assert_eq!(driver.command(1, 9, 1, [DATA, 0], [2, 0, 0]), (0, 0), "advice");
    assert_eq!(driver.log(), ["zero 8704 1024", "discard 51200 2048", "discard 102400 512"]);
    driver.ram.write(DATA, &[range(4, 100), range(2, BLOCKS - 1)].concat()).unwrap();
    assert_eq!(driver.command(1, 9, 1, [DATA, 0], [1, 4, 0]).0, 0x80);
    assert_eq!(driver.log(), [""; 0]);
    assert_eq!(driver.io(2, 16, 8), (0, 0));
    let bytes = driver.bytes(DATA, 4096);
    assert_eq!([0, 512, 1535, 1536].map(|at| bytes[at]), [7, 0, 0, 7]);
}

#[test]
fn the_host_s_errors_are_the_disk_s() {
    let mut driver = Driver::ready();
    for (number, opcode, status) in [
        (libc::EIO, 2, 0x281),
        (libc::EIO, 1, 0x280),
        (libc::ENOSPC, 1, 0x81),
        (libc::EROFS, 8, 0x20),
        (libc::EIO, 0, 0x280),
    ] {
        driver.disk.0.lock().unwrap().fails = Some(number);
        assert_eq!(driver.io(opcode, 0, 1).0, status);
        assert!(driver.controller.finish().is_err());
        driver.disk.0.lock().unwrap().fails = None;
        assert_ne!(driver.io(0, 0, 1).0, 0, "the driver learns of the flush between");
        assert_eq!(driver.io(opcode, 0, 1).0, 0, "it works again");
    }
}

/// Linux reports lost writes once: to the flush of a reset, which has no answer.
#[test]
fn writes_that_were_lost_at_a_reset_fail_the_next_flush() {
    let forced = [0, 0, 1 << 30];
    let asks: [fn(&mut Driver) -> Ended; 4] = [
        |driver| driver.io(0, 0, 1),
        |driver| driver.command(1, 0, u32::MAX, [0; 2], [0; 3]),
        |driver| driver.command(1, 1, 1, [DATA, 0], [0, 0, 1 << 30]),
        |driver| driver.admin(9, 0, [6, 0, 0], 0),
    ];
    for ask in asks {
        // A reset, and a shutdown before it.
        for values in [[0x0046_0000].as_slice(), &[0x0046_4001, 0x0046_0000]] {
            let mut driver = Driver::ready();
            assert_eq!(driver.io(1, 0, 1), (0, 0));
            driver.disk.0.lock().unwrap().fails = Some(libc::EIO);
            driver.write(0x14, values[0]);
            driver.disk.0.lock().unwrap().fails = None;
            values[1..].iter().for_each(|value| driver.write(0x14, *value));
            driver.enable();
            driver.make_queues();
            assert_eq!(driver.io(2, 0, 1), (0, 0), "a read has nothing to tell");
            assert!(driver.controller.finish().unwrap_err().contains("namespace 1"));
            assert_eq!(ask(&mut driver).0, 0x280);
            assert_eq!(ask(&mut driver).0, 0, "it was told");
            assert_eq!(driver.command(1, 1, 1, [DATA, 0], forced), (0, 0));
            driver.controller.finish().unwrap();
        }
    }
}

/// A flush that fails after the reset of its controller has no answer either.
#[test]
fn a_flush_that_a_reset_has_ended_is_not_told() {
    let (mut driver, hold) = Driver::held();
    let registers = driver.controller.registers();
    let disk = driver.disk.clone();
    let worker = thread::spawn(move || {
        driver.submit(1, 0, 1, [0; 2], [0; 3]);
        driver
    });
    hold.begun.recv().unwrap();
    registers.write(0x14, &0x0046_0000_u32.to_le_bytes());
    disk.0.lock().unwrap().fails = Some(libc::EIO);
    hold.goes.send(()).unwrap();
    // The flush of the reset itself.
    hold.begun.recv().unwrap();
    disk.0.lock().unwrap().fails = None;
    drop(hold.goes);
    let mut driver = worker.join().unwrap();
    driver.enable();
    driver.make_queues();
    assert_eq!((driver.io(0, 0, 1).0, driver.io(0, 0, 1).0), (0x280, 0));
}

#[test]
fn queues_are_made_and_deleted_in_order() {
    let mut driver = Driver::ready();
    let at = QUEUES[0] + 0x8000;
    for (opcode, words, page, status) in [
        (5, [0x0007_0001, 1, 0], at, 0x101),
        (5, [0x0007_0005, 1, 0], at, 0x101),
        (5, [0x0007_0000, 1, 0], at, 0x101),
        (5, [0x0000_0002, 1, 0], at, 0x102),
        (5, [0x0040_0002, 1, 0], at, 0x102),
        (5, [0x0007_0002, 0, 0], at, 2),
        (5, [0x0007_0002, 3 << 16 | 3, 0], at, 0x108),
        (5, [0x0007_0002, 1, 0], at + 8, 0x13),
        (1, [0x0007_0002, 2 << 16 | 1, 0], at, 0x100),
        (1, [0x0007_0002, 1, 0], at, 0x100),
        (1, [0x0007_0001, 1 << 16 | 1, 0], at, 0x101),
        (4, [1, 0, 0], 0, 0x10C),
        (4, [0, 0, 0], 0, 0x101),
        (0, [3, 0, 0], 0, 0x101),
        (0, [1, 0, 0], 0, 0),
        (4, [1, 0, 0], 0, 0),
        (4, [1, 0, 0], 0, 0x101),
    ] {
        assert_eq!(driver.admin(opcode, 0, words, page).0, status, "{opcode} {words:x?}");
    }
    driver.submit(1, 2, 1, [DATA, 0], [0; 3]);
    assert_eq!(driver.end(1), None, "the queue is gone");
}

#[test]
fn features_and_logs_are_those_that_a_driver_asks_for() {
    let mut driver = Driver::ready();
    assert_eq!(driver.admin(0x0A, 0, [7, 0, 0], 0), (0, 0x0003_0003));
    assert_eq!(driver.admin(9, 0, [0x0B, 0x100, 0], 0), (0, 0));
    assert_eq!(driver.admin(0x0A, 0, [0x0B, 0, 0], 0), (0, 0x100));
    assert_eq!(driver.admin(0x0A, 0, [0x09, 2, 0], 0), (0, 2));
    for (opcode, words, status) in [
        (9, [0x8000_0006, 1, 0], 0x10D),
        (9, [7, 0xFFFF, 0], 2),
        (9, [0x0C, 1, 0], 2),
        (9, [9, 3, 0], 2),
        (0x0A, [0x0D, 0, 0], 2),
        (0x0A, [0x0106, 0, 0], 2),
        (2, [0x007F_0005, 0, 0], 0x109),
        (2, [0xFFFF_0002, 0xFFFF, 0], 2),
    ] {
        assert_eq!(driver.admin(opcode, 0, words, DATA).0, status, "{opcode} {words:x?}");
    }
    assert_eq!(driver.admin(2, u32::MAX, [0x007F_0002, 0, 0], DATA), (0, 0));
    assert_eq!(driver.bytes(DATA, 5), [0, 42, 1, 100, 10]);
    assert_eq!(driver.admin(2, 0, [0x007F_0003, 0, 0], DATA), (0, 0));
    assert_eq!(driver.bytes(DATA + 8, 8), b"2B2QEXM7");
    assert_eq!(driver.admin(2, 0, [0x000F_0001, 0, 0], DATA), (0, 0));
    assert_eq!(driver.admin(8, 0, [1, 0, 0], 0), (0, 1), "nothing was aborted");
}

#[test]
fn events_wait_and_too_many_are_refused() {
    let mut driver = Driver::ready();
    for _ in 0..4 {
        driver.submit(0, 0x0C, 0, [0; 2], [0; 3]);
        assert_eq!(driver.end(0), None);
    }
    assert_eq!(driver.admin(0x0C, 0, [0; 3], 0).0, 0x105);
    assert_eq!(driver.admin(0x0A, 0, [7, 0, 0], 0).0, 0, "others go on");
}

/// A driver resets a controller when it resumes, whatever the controller has just done.
#[test]
fn a_reset_forgets_queues_and_events_and_keeps_the_content() {
    let mut driver = Driver::ready();
    driver.ram.write(DATA, &[9; 512]).unwrap();
    assert_eq!(driver.io(1, 3, 1), (0, 0));
    driver.submit(0, 0x0C, 0, [0; 2], [0; 3]);
    for shutdown in [0, 0x4000] {
        driver.write(0x14, 0x0046_0001 | shutdown);
        driver.write(0x14, 0x0046_0000 | shutdown);
        assert_eq!(driver.status() & 3, 0);
        driver.enable();
        assert_eq!(driver.status(), 1);
        driver.submit(1, 2, 1, [DATA, 0], [0; 3]);
        assert_eq!(driver.end(1), None, "there is no such queue");
        (driver.tails[1], driver.heads[1]) = (0, 0);
        assert_eq!(driver.admin(5, 0, [0x0007_0001, 2 << 16 | 3, 0], QUEUES[1]), (0, 0));
        assert_eq!(driver.admin(1, 0, [0x0007_0001, 1 << 16 | 1, 0], QUEUES[0]), (0, 0));
        driver.ram.write(DATA, &[0; 512]).unwrap();
        assert_eq!(driver.io(2, 3, 1), (0, 0));
        assert_eq!(driver.bytes(DATA, 512), [9; 512]);
    }
    // A reset of the function.
    driver.controller.registers().reset();
    driver.controller.work();
    assert_eq!(driver.status(), 0);
}

#[test]
fn a_controller_that_cannot_be_on_is_in_a_fatal_state_until_it_is_off() {
    let mut driver = Driver::new();
    driver.write(0x14, 1);
    assert_eq!(driver.status(), 2, "it has no queues");
    driver.write(0x14, 0);
    assert_eq!(driver.status(), 0);
    driver.write(0x24, 7 | 7 << 16);
    driver.write(0x14, 1 | 1 << 7);
    assert_eq!(driver.status(), 2, "its pages have 8 KiB");
    driver.write(0x14, 0);
    driver.controller.registers().write(0x28, &0x40_0000_u64.to_le_bytes());
    driver.write(0x14, 1);
    assert_eq!(driver.status(), 1);
    driver.write(0x1000, 1);
    assert_eq!(driver.status(), 2, "its queue is in no memory");
    driver.write(0x14, 0);
    driver.enable();
    assert_eq!(driver.status(), 1);
}

#[test]
fn ends_wait_for_room_in_their_queue() {
    let mut driver = Driver::ready();
    driver.log();
    for at in 0..7 {
        driver.submit(1, 2, 1, [DATA, 0], [at, 0, 0]);
    }
    // The queue of submissions is free again, and that of ends is full.
    driver.submit(1, 2, 1, [DATA, 0], [7, 0, 0]);
    assert_eq!(driver.log().len(), 7);
    let ended: Vec<u16> = std::iter::from_fn(|| driver.end(1)).map(|(identifier, _)| identifier).collect();
    assert_eq!(ended.len(), 8, "{ended:?}");
    assert!(ended.windows(2).all(|pair| pair[0] + 1 == pair[1]));
    assert_eq!(driver.log().len(), 1);
}

/// A reset of the controller, one of the function, and the end of its leave to reach memory.
const TAKES_MEMORY: [fn(&super::Registers); 4] = [
    |registers| assert!(registers.write(0x14, &0x0046_0000_u32.to_le_bytes())),
    |registers| registers.reset(),
    |registers| registers.set_master(false),
    |registers| {
        registers.set_master(false);
        registers.set_master(true);
    },
];

/// Linux frees the pages of a command when it has reset the controller, or given it up.
#[test]
fn a_read_that_hangs_reaches_no_memory_after_a_reset() {
    for (at, takes) in TAKES_MEMORY.into_iter().enumerate() {
        let mut driver = Driver::hang(2, takes);
        assert!(driver.bytes(DATA, 512 * 512) == [0xEE; 512 * 512], "{at}");
        assert_eq!(driver.end(1), None, "{at}");
        assert_eq!(*driver.raised.0.lock().unwrap(), [0; 0], "{at}");
        let status = driver.status();
        assert_eq!(status, if at < 2 { 0 } else { 2 }, "{at}: without memory it cannot go on");
        driver.controller.registers().set_master(true);
        driver.write(0x14, 0);
        driver.enable();
        driver.make_queues();
        assert_eq!(driver.io(2, 0, 512), (0, 0));
        assert!(driver.bytes(DATA, 512 * 512) == [1; 512 * 512], "{at}");
    }
    let driver = Driver::hang(2, |_| ());
    assert!(driver.bytes(DATA, 512 * 512) == [1; 512 * 512], "without a reset it ends");
}

#[test]
fn a_write_that_hangs_writes_no_freed_memory_after_a_reset() {
    for (at, takes) in TAKES_MEMORY.into_iter().enumerate() {
        let driver = Driver::hang(1, takes);
        let content = &driver.disk.0.lock().unwrap().bytes;
        assert!(content[256 * 512..].iter().all(|byte| *byte == 1), "{at}");
    }
    let driver = Driver::hang(1, |_| ());
    assert!(driver.disk.0.lock().unwrap().bytes[..512 * 512] == [0xEE; 512 * 512]);
}

/// A driver that does not wait for the end of its reset.
#[test]
fn a_controller_that_is_off_and_on_at_once_forgets_its_queues() {
    let mut driver = Driver::ready();
    let registers = driver.controller.registers();
    registers.write(0x14, &0x0046_0000_u32.to_le_bytes());
    registers.write(0x14, &0x0046_0001_u32.to_le_bytes());
    driver.submit(1, 2, 1, [DATA, 0], [0; 3]);
    assert_eq!((driver.status(), driver.end(1)), (1, None));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The disk has what the driver wrote, after any commands.
    #[test]
    fn the_disk_is_as_the_driver_left_it(
        steps in proptest::collection::vec((0_u8..5, 0_u64..200, 1_u32..40, any::<u8>()), 1..60),
    ) {
        let mut driver = Driver::ready();
        let mut model = vec![0_u8; 256 * 512];
        for (step, first, count, byte) in steps {
            let range = first as usize * 512..(first as usize + count as usize) * 512;
            match step {
                0 | 1 => {
                    driver.ram.write(DATA, &vec![byte; range.len()]).unwrap();
                    prop_assert_eq!(driver.io(1, first, count), (0, 0));
                    model[range].fill(byte);
                }
                2 => {
                    prop_assert_eq!(driver.io(2, first, count), (0, 0));
                    prop_assert_eq!(&driver.bytes(DATA, range.len()), &model[range]);
                }
                3 => {
                    prop_assert_eq!(driver.io(8, first, count), (0, 0));
                    model[range].fill(0);
                }
                _ => prop_assert_eq!(driver.io(0, 0, 1), (0, 0)),
            }
        }
        prop_assert_eq!(&driver.disk.0.lock().unwrap().bytes[..model.len()], &model);
    }
}
