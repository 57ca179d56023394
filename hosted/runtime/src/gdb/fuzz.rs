//! A debugger that sends arbitrary bytes.
//!
//! The target has no machine, so that requests for its registers and its memory are refused. The packets, the
//! states of a session and the decoder of a step ([`super::step`]) are the ones of a real session.

use std::{fs::File, io::Write, net::Shutdown, os::unix::net::UnixStream};

use gdbstub::stub::{GdbStub, state_machine::GdbStubStateMachine};
use iced_x86::Register;

use super::{
    KernelCode, Reason,
    connection::Connection,
    step::{Guest, successors},
    target::Target,
};

/// Largest input in bytes. The socket holds all of it.
const LONGEST: usize = 8 << 10;

/// Inputs to begin with: packets of a session.
pub const SEEDS: &[&[u8]] = &[
    b"+$qSupported:multiprocess+;swbreak+;hwbreak+;vContSupported+#00+$?#3f+$g#67",
    b"+$qXfer:features:read:target.xml:0,fff#7d+$mffffffff81000000,40#00+$vCont?#49",
    b"+$Z0,ffffffff81000000,1#00+$vCont;c#a8\x03+$z0,ffffffff81000000,1#00+$s#73+$D#44",
    b"+$vKill;1#00+$k#6b+$X1000,4:abcd#00+$P10=0000000000000000#00+$Hg0#df+$qC#b4",
];

/// A guest whose registers and memory are made up.
struct MadeUp(u64);

impl Guest for MadeUp {
    fn register(&self, register: Register) -> u64 {
        self.0.wrapping_mul(register as u64 + 1)
    }

    fn long(&self, address: u64) -> Option<u64> {
        (!address.is_multiple_of(3)).then(|| address.rotate_left(7) ^ self.0)
    }
}

/// Holds a session over these bytes.
pub fn run(input: &[u8]) {
    let input = &input[..input.len().min(LONGEST)];
    let seed = input.iter().fold(1_u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(u64::from(*byte)));
    let code = &input[..input.len().min(15)];
    let _ = successors(code, 0xFFFF_FFFF_8100_0000, &MadeUp(seed));

    let Ok((mut gdb, own)) = UnixStream::pair() else { return };
    let is_sent = own.set_nonblocking(true).is_ok()
        && gdb.write_all(input).is_ok()
        && gdb.shutdown(Shutdown::Write).is_ok();
    if is_sent {
        converse(Connection::new(File::from(std::os::fd::OwnedFd::from(own))));
    }
}

fn converse(connection: Connection) {
    let mut target = Target::new(KernelCode::default());
    let mut session = GdbStub::new(connection).run_state_machine(&mut target).ok();
    while let Some(now) = session.take() {
        session = match now {
            GdbStubStateMachine::Idle(mut idle) => match idle.borrow_conn().read() {
                Some(byte) => idle.incoming_data(&mut target, byte).ok(),
                None => None,
            },
            GdbStubStateMachine::Running(mut running) => match running.borrow_conn().read() {
                Some(byte) if byte % 2 == 0 => running.report_stop(&mut target, Reason::DoneStep).ok(),
                Some(byte) => running.incoming_data(&mut target, byte).ok(),
                None => None,
            },
            GdbStubStateMachine::CtrlCInterrupt(interrupt) => {
                interrupt.interrupt_handled(&mut target, Some(Reason::DoneStep)).ok()
            }
            GdbStubStateMachine::Disconnected(_) => None,
        };
    }
}
