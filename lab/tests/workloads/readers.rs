//! Devices that are only read, at work. They serve machines that roll back while the contents of
//! their disks do not, and tests that compare pages and nothing else. The loads of
//! [`super::devices`] write, too, and check every byte.

use std::{
    io::Write,
    net::{Ipv4Addr, TcpListener},
    thread,
};

use mercury_lab::{Bus, Kernel, Machine, Nic, Result, Spec};

/// Describes a machine with the devices of physical servers.
pub fn real_hardware() -> Spec {
    let usb = ["-device", "qemu-xhci", "-device", "usb-storage,drive=stick"];
    let stick = [
        "-drive",
        "if=none,id=stick,format=raw,file.driver=null-co,file.read-zeroes=on,file.size=1073741824,\
         read-only=on",
    ];
    let spec = Spec::new(Kernel::BookwormGeneric)
        .cpus(2)
        .memory_mib(1536)
        .root_bus(Bus::Ahci)
        .nic(Nic::E1000e)
        .disk(Bus::Nvme, 256)
        .kernel_arg("init_on_alloc=0");
    usb.iter().chain(&stick).fold(spec, |spec, argument| spec.qemu_arg(argument))
}

/// The drivers of those devices without which the machine boots.
pub const REAL_DRIVERS: &str = "nvme e1000e xhci_pci usb_storage sd_mod";

/// Gives the only network card an address, and waits until a peer answers.
pub fn give_address(machine: &Machine) -> Result<()> {
    machine
        .sh("card=$(ls -d /sys/class/net/*/device | cut -d/ -f5 | head -1); \
         ip address add 10.0.2.15/24 dev $card && ip link set $card up; \
         until ping -c 1 -W 1 10.0.2.2 > /dev/null; do sleep 0.2; done")
        .map(drop)
}

/// Returns a script that reads a whole disk, directly and buffered.
pub fn disk_load(disk: &str) -> String {
    format!(
        "dd if={disk} of=/dev/null bs=256k count=200 iflag=direct status=none; \
         dd if={disk} of=/dev/null bs=1M count=50 status=none; echo 1 > /proc/sys/vm/drop_caches"
    )
}

/// Serves numbers until the client leaves. Returns the port.
pub fn source() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        let numbers: Vec<u8> = (0..1_u32 << 14).flat_map(u32::to_le_bytes).collect();
        for mut connection in listener.incoming().flatten() {
            while connection.write_all(&numbers).is_ok() {}
        }
    });
    port
}

/// A command that restarts a card: QEMU's e1000e may receive nothing after a snapshot
/// (docs/limits.md).
pub const FRESH_CARD: &str = "card=$(ls -d /sys/class/net/*/device | cut -d/ -f5 | head -1); \
     ip link set $card down; ip link set $card up";

/// Returns a script that receives from the host for a while, as much as comes.
pub fn network_load(port: u16, otherwise: &str) -> String {
    format!("timeout 20 bash -c \"head -c 20M < /dev/tcp/10.0.2.2/{port} > /dev/null\" || {{ {otherwise}; }}")
}
