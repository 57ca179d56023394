//! A machine that moves, for the tests of moves. Its files are on another machine, which is also
//! the switch and talks to it. A third machine is the destination.

use std::{fs, io::Write, net::TcpStream, path::PathBuf, thread, time::Duration};

use mercury_lab::{
    Kernel, Machine, Result, Spec, host,
    moving::{LIMIT, PEER, Switch, move_to, plug_in, receive},
    restart::{
        boot_id, comes_further, count, is_well, nothing_wrong,
        script::{CLOCK, HEAR, TALK},
        start,
    },
};
use serde_json::json;

/// A machine with all its files on another one, and a destination.
pub struct Scene {
    pub switch: Switch,
    pub machine: Machine,
    pub destination: Machine,
}

impl Scene {
    /// Boots the machines with this kernel. Both have the same processors and devices.
    pub fn new(kernel: Kernel, cpus: u32, memory_mib: u32) -> Result<Self> {
        Self::with(kernel, cpus, [memory_mib; 2])
    }

    pub fn with(kernel: Kernel, cpus: u32, memory_mib: [u32; 2]) -> Result<Self> {
        Self::changed(kernel, cpus, memory_mib, |spec| spec)
    }

    /// Boots the machines with changed descriptions.
    pub fn changed(
        kernel: Kernel,
        cpus: u32,
        memory_mib: [u32; 2],
        change: impl Fn(Spec) -> Spec,
    ) -> Result<Self> {
        let switch = Switch::boot_for(kernel)?;
        let machine = switch.boot_moving(change(switch.plugged(kernel, cpus, memory_mib[0], 2)))?;
        let destination = switch.boot_other(change(switch.plugged(kernel, cpus, memory_mib[1], 3)))?;
        plug_in(&destination, "10.9.0.3")?;
        start_work(&switch, &machine)?;
        Ok(Self { switch, machine, destination })
    }
}

/// Starts the work that goes on across a move: a clock, and connections with the switch.
pub fn start_work(switch: &Switch, machine: &Machine) -> Result<()> {
    start(machine, "clock", CLOCK, "")?;
    start(machine, "talk", TALK, PEER)?;
    start(machine, "hear", HEAR, "")?;
    switch.tell()?;
    machine.sh("modprobe -r kvm_amd 2> /dev/null || true").map(drop)
}

/// The destination's message on its console.
pub const COMES: &str = "mercury: a machine arrives";
pub const THROWN: &str = "was discarded";

/// Moves the machine to the destination, which runs it then.
pub fn moves(
    peer: &Machine,
    machine: &Machine,
    destination: &Machine,
    address: &str,
    options: &str,
) -> Result<()> {
    let key = receive(destination, address)?;
    moves_by(peer, machine, destination, &key, options)
}

/// Moves the machine to a destination that waits already.
pub fn moves_by(
    peer: &Machine,
    machine: &Machine,
    destination: &Machine,
    key: &str,
    options: &str,
) -> Result<()> {
    let id = boot_id(machine)?;
    println!("{}", move_to(machine, destination, key, options)?);
    is_well(destination, &id)?;
    goes_on(peer, destination)
}

/// Checks that the machine is native and at work, with no error in the work of its peers.
pub fn goes_on(peer: &Machine, machine: &Machine) -> Result<()> {
    let status = machine.sh("mercury status --json")?;
    assert!(!status.contains("\"attached\""), "{status}");
    for work in ["talk", "hear"] {
        comes_further(machine, work, count(machine, work)? + 5)?;
    }
    nothing_wrong(peer)
}

/// Checks that the move fails, and the machine goes on as before.
pub fn fails(peer: &Machine, machine: &Machine, line: &str, reasons: &[&str]) -> Result<()> {
    let output = machine.command(line).timeout(LIMIT).run()?;
    println!("{}", output.stderr);
    for reason in reasons {
        assert!(!output.success() && output.stderr.contains(reason), "{reason}: {}", output.stderr);
    }
    machine.sh("! ls /sys/fs/cgroup | grep mercury; ls /")?;
    goes_on(peer, machine)
}

/// Connects to the console, to which nothing else is connected.
pub fn console(machine: &Machine) -> Result<TcpStream> {
    let port = host::free_port()?;
    let address = json!({"type": "inet", "data": {"host": "127.0.0.1", "port": port.to_string()}});
    let socket =
        json!({"addr": address, "server": true, "wait": false, "logfile": "serial.log", "logappend": true});
    let backend = json!({"type": "socket", "data": socket});
    machine.qmp()?.execute("chardev-change", json!({"id": "console", "backend": backend}))?;
    Ok(TcpStream::connect(("127.0.0.1", port)).unwrap())
}

/// Types at the console.
pub fn type_in(machine: &Machine, text: &str) -> Result<()> {
    console(machine)?.write_all(text.as_bytes()).unwrap();
    thread::sleep(Duration::from_secs(1));
    Ok(())
}

/// Makes the kernel kill a process by SysRq, since every task that could be ordered to do so is
/// frozen. The kernel chooses the process that it would kill first.
pub fn kill_a_process(machine: &Machine) -> Result<()> {
    let mut console = console(machine)?;
    machine.qmp()?.execute("chardev-send-break", json!({"id": "console"}))?;
    thread::sleep(Duration::from_millis(300));
    console.write_all(b"f").unwrap();
    thread::sleep(Duration::from_secs(1));
    Ok(())
}

/// Files on this host that are disks of more than one machine.
pub struct Shared(PathBuf);

impl Shared {
    pub fn new(names: &[&str]) -> Self {
        let folder = std::env::temp_dir().join(format!("mercury-shared-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for name in names {
            fs::File::create(folder.join(name)).unwrap().set_len(64 << 20).unwrap();
        }
        Self(folder)
    }

    pub fn plug(&self, names: &[&str], spec: Spec) -> Spec {
        names.iter().fold(spec, |spec, name| {
            let file = self.0.join(name);
            let file = file.display();
            spec.qemu_arg("-drive")
                .qemu_arg(&format!(
                    "if=none,id={name},file={file},format=raw,file.locking=off,cache=writethrough"
                ))
                .qemu_arg("-device")
                .qemu_arg(&format!("virtio-blk-pci,drive={name},serial={name}"))
        })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns a disk's name in a machine.
pub fn disk(machine: &Machine, serial: &str) -> Result<String> {
    machine.sh(&format!("echo /dev/$(grep -lx {serial} /sys/block/*/serial | cut -d/ -f4)"))
}
