//! One NMI at each step of attach and detach. QEMU's debugger stops the processor at an instruction
//! of the gate or of the hypervisor, an NMI is injected there, and the processor goes on. The
//! system must get each NMI exactly once.

use std::{
    io::{Read, Write},
    net::TcpStream,
    process::Command,
    time::Duration,
};

use mercury_lab::{Error, Machine, Result, Variant, hypervisor};

use crate::{MINUTE, plain, subject::same};

const CLGI: &[u8] = &[0x0F, 0x01, 0xDD];
const STGI: &[u8] = &[0x0F, 0x01, 0xDC];
const VMRUN: &[u8] = &[0x0F, 0x01, 0xD8];
const FAR_RETURN: &[u8] = &[0x48, 0xCB];
/// Offsets in the gate's block, as in `switch/driver/mercury_abi.h`.
const GATE_ENTRY_VIRT: u64 = 16;
const RDI: usize = 5;

#[test]
fn an_nmi_at_each_step_arrives_once() -> Result<()> {
    let machine = Machine::boot(plain().cpus(1).gdb())?;
    machine.mercury("load")?;
    let mut debugger = Debugger::connect(&machine)?;
    let steps = steps(&machine, &mut debugger)?;
    for (name, address) in steps {
        println!("{name} at {address:#x}");
        let before = nmis(&machine)?;
        switch_with(&machine, &mut debugger, address, |machine, _| machine.qmp()?.inject_nmi())?;
        same(&name, nmis(&machine)?, before + 1)?;
    }
    machine.check_health()?;
    machine.check_next_attach()
}

fn nmis(machine: &Machine) -> Result<u64> {
    let count = machine.sh("awk '/NMI:/ {print $2}' /proc/interrupts")?;
    count.parse().map_err(|_| Error::Unhealthy(format!("no count of NMIs: {count}")))
}

/// Attaches and detaches once. Calls `what` when the processor arrives at `address`.
fn switch_with<T>(
    machine: &Machine,
    debugger: &mut Debugger,
    address: u64,
    what: impl FnOnce(&Machine, &mut Debugger) -> Result<T>,
) -> Result<T> {
    debugger.stop()?;
    debugger.ask(&format!("Z1,{address:x},1"))?;
    debugger.go_on()?;
    let switch = machine.spawn("mercury-workload switch --cycles 1")?;
    debugger.wait_stop()?;
    let result = what(machine, debugger)?;
    debugger.ask(&format!("z1,{address:x},1"))?;
    debugger.go_on()?;
    switch.wait(MINUTE)?.check()?;
    Ok(result)
}

/// Returns the instructions at which the processor is stopped, in the order of execution.
fn steps(machine: &Machine, debugger: &mut Debugger) -> Result<Vec<(String, u64)>> {
    let enter = kernel_symbol(machine, "mercury_svm_enter")?;
    let leave = kernel_symbol(machine, "mercury_svm_leave")?;
    let area = switch_with(machine, debugger, enter, |_, debugger| {
        let rdi = debugger.register(RDI)?;
        let entry = debugger.memory(rdi + GATE_ENTRY_VIRT, 8)?;
        Ok((rdi, u64::from_le_bytes(entry.try_into().unwrap())))
    })?;
    let symbols = image_symbols()?;
    let image = area.1 - symbol(&symbols, "mercury_entry_svm")?;
    let run = image + symbol(&symbols, "3svm3run6switch3run")?;
    let (gate_in, gate_out) = (text(debugger, enter, 160)?, text(debugger, leave, 512)?);
    // The kernel maps the hypervisor's text too, for reading.
    let vmrun = run + find(&text(debugger, run, 256)?, VMRUN)?;
    let stgi = leave + find(&gate_out, STGI)?;
    let steps = [
        ("before CLGI", enter + find(&gate_in, CLGI)?),
        ("after CLGI", enter + find(&gate_in, CLGI)? + 3),
        ("at the hypervisor's entry", area.1),
        ("in the native operation", image + symbol(&symbols, "6switch10svm_native")?),
        ("before the system's state is loaded", image + symbol(&symbols, "6switch9run_first")?),
        ("at VMRUN", vmrun),
        ("after the exit", vmrun + 3),
        ("in the answer to the exit", image + symbol(&symbols, "3svm5quick10quick_exit")?),
        ("at the way out", leave),
        ("at STGI", stgi),
        ("after STGI", stgi + 3),
        ("at the far return", leave + find(&gate_out, FAR_RETURN)?),
    ];
    Ok(steps.map(|(name, address)| (name.to_owned(), address)).to_vec())
}

fn kernel_symbol(machine: &Machine, name: &str) -> Result<u64> {
    let address = machine.sh(&format!("awk '$3 == \"{name}\" {{print $1}}' /proc/kallsyms"))?;
    u64::from_str_radix(&address, 16).map_err(|_| Error::Unhealthy(format!("{name} is at {address:?}")))
}

/// Returns the offsets of the image's functions.
fn image_symbols() -> Result<Vec<(String, u64)>> {
    let elf = hypervisor::build(Variant::Production)?.with_extension("elf");
    let output = Command::new("nm").arg(elf).output().unwrap();
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    let words = lines.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let pairs = words.filter(|words| words.len() == 3);
    Ok(pairs
        .filter_map(|words| Some((words[2].to_owned(), u64::from_str_radix(words[0], 16).ok()?)))
        .collect())
}

fn symbol(symbols: &[(String, u64)], part: &str) -> Result<u64> {
    let found = symbols.iter().find(|(name, _)| name.contains(part)).map(|(_, offset)| *offset);
    found.ok_or_else(|| Error::Unhealthy(format!("no function is called like {part}")))
}

fn text(debugger: &mut Debugger, address: u64, size: u64) -> Result<Vec<u8>> {
    debugger.stop()?;
    let bytes = debugger.memory(address, size)?;
    debugger.go_on()?;
    Ok(bytes)
}

fn find(text: &[u8], instruction: &[u8]) -> Result<u64> {
    let at = text.windows(instruction.len()).position(|bytes| bytes == instruction);
    at.map(|at| at as u64).ok_or_else(|| Error::Unhealthy(format!("no {instruction:x?} in {text:x?}")))
}

/// The part of gdb's remote protocol that this test needs: packets `$data#checksum`, each
/// acknowledged by `+`.
struct Debugger(TcpStream);

impl Debugger {
    /// Connects to the debugger. The machine stops for the connection, and goes on.
    fn connect(machine: &Machine) -> Result<Self> {
        let port = machine.gdb_port().unwrap();
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut debugger = Self(stream);
        debugger.ask("?")?;
        debugger.go_on()?;
        Ok(debugger)
    }

    fn send(&mut self, packet: &str) {
        let sum = packet.bytes().fold(0_u8, u8::wrapping_add);
        self.0.write_all(format!("${packet}#{sum:02x}").as_bytes()).unwrap();
    }

    /// Returns the answer to a packet. A report of a stop may come first: QEMU sends one when it
    /// stops for the connection, unless it was asked before.
    fn ask(&mut self, packet: &str) -> Result<String> {
        self.send(packet);
        let mut answer = self.receive()?;
        while packet != "?" && is_stop(&answer) {
            answer = self.receive()?;
        }
        if answer.starts_with('E') {
            return Err(Error::Unhealthy(format!("the debugger refuses {packet}: {answer}")));
        }
        Ok(answer)
    }

    fn receive(&mut self) -> Result<String> {
        let mut packet = String::new();
        let mut byte = [0];
        let mut inside = false;
        loop {
            self.0
                .read_exact(&mut byte)
                .map_err(|error| Error::Unhealthy(format!("the debugger: {error}")))?;
            match byte[0] {
                b'$' => inside = true,
                b'#' if inside => break,
                other if inside => packet.push(char::from(other)),
                _ => {}
            }
        }
        self.0.read_exact(&mut [0; 2]).unwrap();
        self.0.write_all(b"+").unwrap();
        Ok(packet)
    }

    fn go_on(&mut self) -> Result<()> {
        self.send("c");
        Ok(())
    }

    /// Stops the machine at whatever instruction it is.
    fn stop(&mut self) -> Result<()> {
        self.0.write_all(&[3]).unwrap();
        self.wait_stop()
    }

    fn wait_stop(&mut self) -> Result<()> {
        let said = self.receive()?;
        same(&format!("stopped: {said}"), is_stop(&said), true)
    }

    fn register(&mut self, number: usize) -> Result<u64> {
        let all = bytes(&self.ask("g")?);
        let value = all.get(8 * number..8 * number + 8).and_then(|value| value.try_into().ok());
        Ok(u64::from_le_bytes(value.unwrap_or_default()))
    }

    fn memory(&mut self, address: u64, size: u64) -> Result<Vec<u8>> {
        Ok(bytes(&self.ask(&format!("m{address:x},{size:x}"))?))
    }
}

/// Returns true for a report of a stop. Hexadecimal answers have small letters only.
fn is_stop(packet: &str) -> bool {
    packet.starts_with(['T', 'S'])
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits = hex.as_bytes().chunks_exact(2);
    digits.filter_map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}
