//! The filter of system calls for a program's process.
//!
//! The program's own calls become signals. The process's own code makes its calls at three places:
//! the report to the monitor, the monitor's orders, and the return from a signal. A program may
//! jump there. So orders and returns need a secret in the upper halves of two arguments, which the
//! host ignores. The secret is in the process's memory only from the monitor's answer until the
//! orders begin. The program does not run then.

use libc::sock_filter;

/// The call that reports. It blocks all signals, as soon as the monitor has answered. So no signal
/// comes while the secret is in memory, even if a program has jumped to the call with signals
/// unblocked.
pub const REPORT: u32 = libc::SYS_rt_sigprocmask as u32;
/// The arguments of the report besides the set and the old set, of which there is none: the
/// operation, and the size of the set in bytes.
pub const REPORT_HOW: u32 = libc::SIG_SETMASK as u32;
pub const REPORT_SIZE: u32 = 8;
/// The system calls for orders.
pub const ORDERS: [i64; 4] = [libc::SYS_mmap, libc::SYS_munmap, libc::SYS_mprotect, libc::SYS_close_range];
/// The arguments whose upper halves hold the secret.
pub const SECRET_IN: [u32; 2] = [3, 4];

/// The addresses after the three places' system calls.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// The address after the report.
    pub reported: u64,
    /// The address after an order.
    pub ordered: u64,
    /// The address after the return from a signal.
    pub returned: u64,
    /// The set of all signals, in read-only memory.
    pub all_signals: u64,
}

/// Offsets in the data of a filter.
mod data {
    pub const NUMBER: u32 = 0;
    pub const ARCHITECTURE: u32 = 4;
    pub const ADDRESS: u32 = 8;
    pub const ARGUMENTS: u32 = 16;
}

/// The architecture of 64-bit calls.
pub const X86_64: u32 = 0xC000_003E;
const TRAP: u32 = libc::SECCOMP_RET_TRAP;

/// A step of the filter.
enum Test {
    /// Loads this word.
    Load(u32),
    /// Goes to a part if the word is equal.
    To(u32, usize),
    /// Traps if the word is not equal.
    Must(u32),
    /// Ends with this result.
    Return(u32),
}

/// Makes the filter.
#[must_use]
pub fn program(places: &Places, secret: [u32; 2]) -> Vec<sock_filter> {
    const REPORTING: usize = 1;
    const ORDERING: usize = 2;
    const RETURNING: usize = 3;
    const SECRET: usize = 4;
    let low = |address: u64| address as u32;
    let secret_word = |which: usize| data::ARGUMENTS + SECRET_IN[which] * 8 + 4;
    let start = vec![
        Test::Load(data::ARCHITECTURE),
        Test::Must(X86_64),
        Test::Load(data::ADDRESS + 4),
        Test::Must(0),
        Test::Load(data::ADDRESS),
        Test::To(low(places.reported), REPORTING),
        Test::To(low(places.ordered), ORDERING),
        Test::To(low(places.returned), RETURNING),
        Test::Return(TRAP),
    ];
    let mut reporting = vec![
        Test::Load(data::NUMBER),
        Test::Must(REPORT),
        // The host uses the lower half only.
        Test::Load(data::ARGUMENTS),
        Test::Must(REPORT_HOW),
    ];
    for (number, value) in [(1, low(places.all_signals)), (2, 0), (3, REPORT_SIZE)] {
        let argument = data::ARGUMENTS + number * 8;
        reporting.extend([Test::Load(argument), Test::Must(value), Test::Load(argument + 4), Test::Must(0)]);
    }
    reporting.push(Test::Return(libc::SECCOMP_RET_USER_NOTIF));
    let mut ordering = vec![Test::Load(data::NUMBER)];
    ordering.extend(ORDERS.map(|number| Test::To(number as u32, SECRET)));
    ordering.push(Test::Return(TRAP));
    let returning =
        vec![Test::Load(data::NUMBER), Test::To(libc::SYS_rt_sigreturn as u32, SECRET), Test::Return(TRAP)];
    let with_secret = vec![
        Test::Load(secret_word(0)),
        Test::Must(secret[0]),
        Test::Load(secret_word(1)),
        Test::Must(secret[1]),
        Test::Return(libc::SECCOMP_RET_ALLOW),
        Test::Return(TRAP),
    ];
    assemble(&[start, reporting, ordering, returning, with_secret])
}

/// Assembles the parts. The last instruction traps.
fn assemble(parts: &[Vec<Test>]) -> Vec<sock_filter> {
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    let begins: Vec<usize> = parts
        .iter()
        .scan(0, |at, part| {
            let begin = *at;
            *at += part.len();
            Some(begin)
        })
        .collect();
    let last = parts.iter().map(Vec::len).sum::<usize>() - 1;
    let instruction = |code: u32, jt, jf, k| sock_filter { code: code as u16, jt, jf, k };
    let from = |at: usize, to: usize| (to - at - 1) as u8;
    let all = parts.iter().flatten().enumerate();
    all.map(|(at, test)| match *test {
        Test::Load(offset) => instruction(LOAD, 0, 0, offset),
        Test::To(value, part) => instruction(EQUAL, from(at, begins[part]), 0, value),
        Test::Must(value) => instruction(EQUAL, 0, from(at, last), value),
        Test::Return(what) => instruction(RETURN, 0, 0, what),
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACES: Places = Places {
        reported: 0x3B00_0020,
        ordered: 0x3B00_0060,
        returned: 0x3B00_0090,
        all_signals: 0x3B00_00A0,
    };
    const SECRET: [u32; 2] = [0x1234_5678, 0x9ABC_DEF0];

    struct Call {
        number: i64,
        architecture: u32,
        address: u64,
        arguments: [u64; 6],
    }

    /// Runs the filter as the host would.
    fn run(call: &Call) -> u32 {
        let mut bytes = (call.number as u32).to_le_bytes().to_vec();
        bytes.extend(call.architecture.to_le_bytes());
        bytes.extend(call.address.to_le_bytes());
        bytes.extend(call.arguments.iter().flat_map(|argument| argument.to_le_bytes()));
        let (program, mut at, mut word) = (program(&PLACES, SECRET), 0, 0);
        loop {
            let one = &program[at];
            at += 1;
            match u32::from(one.code) {
                0x20 => {
                    let from = one.k as usize;
                    word =
                        u32::from_le_bytes([bytes[from], bytes[from + 1], bytes[from + 2], bytes[from + 3]]);
                }
                0x15 => at += usize::from(if word == one.k { one.jt } else { one.jf }),
                0x06 => return one.k,
                other => panic!("{other:#x}"),
            }
        }
    }

    fn call(number: i64, address: u64, secret: [u32; 2]) -> u32 {
        let upper = |word: u32| u64::from(word) << 32 | 3;
        let arguments = [1, 2, 3, upper(secret[0]), upper(secret[1]), 6];
        run(&Call { number, architecture: X86_64, address, arguments })
    }

    #[test]
    fn programs_calls_trap_wherever_they_are_made() {
        for number in [0, 9, 11, 15, 59, 62, 101, 436, 0x4000_0009] {
            assert_eq!(call(number, 0x40_1000, SECRET), TRAP);
            assert_eq!(call(number, PLACES.ordered + (1 << 32), SECRET), TRAP);
            assert_eq!(call(number, PLACES.reported, SECRET), TRAP);
        }
        let arguments = [0, 0, 0, u64::from(SECRET[0]) << 32, u64::from(SECRET[1]) << 32, 0];
        let small = Call { number: 9, architecture: 0x4000_0003, address: PLACES.ordered, arguments };
        assert_eq!(run(&small), TRAP);
    }

    #[test]
    fn orders_and_returns_need_the_secret() {
        for number in ORDERS {
            assert_eq!(call(number, PLACES.ordered, SECRET), libc::SECCOMP_RET_ALLOW);
            for wrong in [[0, 0], [SECRET[0], 0], [0, SECRET[1]], [SECRET[1], SECRET[0]]] {
                assert_eq!(call(number, PLACES.ordered, wrong), TRAP);
            }
            assert_eq!(call(number, PLACES.returned, SECRET), TRAP);
        }
        assert_eq!(call(15, PLACES.returned, SECRET), libc::SECCOMP_RET_ALLOW);
        assert_eq!(call(15, PLACES.returned, [0, 0]), TRAP);
        for number in [0, 1, 10 + 512, 15, 56, 59, 62, 101, 317] {
            assert_eq!(call(number, PLACES.ordered, SECRET), TRAP);
        }
    }

    #[test]
    fn a_report_waits_for_the_monitor() {
        let right = [2, PLACES.all_signals, 0, 8, 5, 6];
        let report = |address, arguments| {
            run(&Call { number: REPORT.into(), architecture: X86_64, address, arguments })
        };
        assert_eq!(report(PLACES.reported, right), libc::SECCOMP_RET_USER_NOTIF);
        assert_eq!(report(PLACES.ordered, right), TRAP);
        // With any other argument, signals would stay unblocked after the call.
        for number in 0..4 {
            for wrong in [1, right[number] | 1 << 32] {
                let mut arguments = right;
                arguments[number] = wrong;
                let is_seen = number > 0 || wrong == 1;
                assert_eq!(report(PLACES.reported, arguments) == TRAP, is_seen, "{arguments:x?}");
            }
        }
    }
}
