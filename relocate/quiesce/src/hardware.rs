//! The part of a machine's description that a monitor needs where the machine goes on as a guest, without
//! its own hardware.

use super::{ahci, firmware, nvme};
use mercury_control::{device::Device, driver::Driver, error::Result, sysroot::Sysroot};
use mercury_image::{Bar, Machine, Timers};
use std::{
    fs::File,
    io::Read,
    path::Path,
    time::{Duration, SystemTime},
};

/// Class of bridges between PCI buses and to others.
const BRIDGE: &str = "06";
/// Classes of controllers of disks, on AHCI and on NVMe.
const DISKS: [&str; 2] = ["0106", "0108"];
/// Bytes of configuration space that are kept: the standard's header, and the capabilities too of what a
/// monitor shows to a guest.
const CONFIG: (u64, u64) = (64, 256);
/// Linux divides the rate of the local APIC's timer by this number.
const APIC_DIVISOR: u64 = 16;
/// No timer counts so fast.
const RATE_MAX: u64 = 1 << 40;

/// Adds the firmware's memory, what the PCI devices decode, disks on NVMe and AHCI, and clocks. A machine
/// whose firmware's memory cannot be read goes on only on equal hardware.
///
/// # Errors
///
/// Returns an error if the driver does not answer.
pub fn add_hardware(machine: &mut Machine, sysroot: &Sysroot, device: &Device) -> Result<()> {
    let page = |phys| device.firmware_page(phys).map_err(|error| error.to_string());
    match firmware::read(&machine.firmware, sysroot, &page) {
        Ok(memory) => machine.firmware_memory = memory,
        Err(why) => machine.firmware_unread = why,
    }
    add_resources(machine, sysroot);
    machine.nvme = nvme::controllers(&machine.devices, sysroot);
    machine.ahci = ahci::controllers(&machine.devices, sysroot);
    let clocksource = "sys/devices/system/clocksource/clocksource0/current_clocksource";
    let list = sysroot.text("proc/timer_list").unwrap_or_default();
    machine.timers = Some(Timers {
        tsc_khz: device.system()?.tsc_khz,
        clocksource: sysroot.text(clocksource).unwrap_or_default(),
        tsc: 0,
        apic_hz: rate(&list, "lapic").map_or(0, |hz| hz * APIC_DIVISOR),
        hpet_hz: rate(&list, "hpet").unwrap_or(0),
        rtc_ahead_ms: rtc_ahead_ms(sysroot, now()),
        real_ms: 0,
    });
    Ok(())
}

/// Notes the time-stamp counter, right after the instant. No program of the image has read a larger value.
pub fn note_instant(machine: &mut Machine) {
    if let Some(timers) = &mut machine.timers {
        // SAFETY: Each processor that Mercury knows has the counter, and Linux lets programs read it.
        timers.tsc = unsafe { std::arch::x86_64::_rdtsc() };
    }
}

/// Notes the machine's time for a destination that gets the description now.
pub fn note_time(machine: &mut Machine) {
    if let Some(timers) = &mut machine.timers {
        timers.real_ms = now().as_millis() as u64;
    }
}

/// Returns the time since 1970 by this machine's own clock.
fn now() -> Duration {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default()
}

/// Returns the milliseconds by which the RTC is ahead of the machine's time, in whole seconds, because the
/// RTC has no others. 0 if the kernel shows no RTC of a PC.
fn rtc_ahead_ms(sysroot: &Sysroot, now: Duration) -> i64 {
    const CLOCKS: &str = "sys/class/rtc";
    let text = |name: &str, file| sysroot.text(&format!("{CLOCKS}/{name}/{file}")).unwrap_or_default();
    let names = sysroot.names(CLOCKS);
    let found = names.iter().find(|name| text(name, "name").starts_with("rtc_cmos"));
    let Some(rtc) = found.and_then(|name| text(name, "since_epoch").trim().parse::<i64>().ok()) else {
        return 0;
    };
    let seconds = now.as_secs() as i64;
    // The RTC cuts its time off, too. So equal clocks show the same second, or the machine's is the next.
    let ahead = rtc.saturating_sub(seconds);
    if ahead == -1 { 0 } else { ahead.saturating_mul(1000) }
}

/// Finds the rate of a clock event device in the kernel's list of timers. The kernel multiplies nanoseconds
/// by a number and shifts the product.
fn rate(list: &str, device: &str) -> Option<u64> {
    let block = list.split("Clock Event Device:").skip(1).find(|block| {
        let name = block.lines().next().unwrap_or_default();
        name.trim() == device
    })?;
    let number = |name: &str| {
        let line = block.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().parse::<u64>().ok()
    };
    let (mult, shift) = (number("mult")?, u32::try_from(number("shift")?).ok()?);
    let hz = (u128::from(mult) * 1_000_000_000).checked_shr(shift)?;
    u64::try_from(hz).ok().filter(|hz| (1..RATE_MAX).contains(hz))
}

fn add_resources(machine: &mut Machine, sysroot: &Sysroot) {
    for device in &mut machine.devices {
        let folder = format!("sys/bus/pci/devices/{}", device.address);
        if !sysroot.exists(&folder) {
            // A guest remembers it, with its resources.
            continue;
        }
        device.bars = bars(&sysroot.text(&format!("{folder}/resource")).unwrap_or_default());
        let is_shown = [BRIDGE, DISKS[0], DISKS[1]].iter().any(|class| device.class.starts_with(class));
        let length = if is_shown { CONFIG.1 } else { CONFIG.0 };
        device.config = first_bytes(&sysroot.path(&format!("{folder}/config")), length).unwrap_or_default();
    }
}

/// Parses the kernel's list of a device's resources: first address, last address and flags.
fn bars(resources: &str) -> Vec<Bar> {
    let bar = |(number, line): (u32, &str)| {
        let word = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
        let words: Vec<_> = line.split_whitespace().filter_map(word).collect();
        let [start, last, flags] = words[..] else { return None };
        (flags != 0).then_some(Bar { number, start, length: last.checked_sub(start)?.checked_add(1)?, flags })
    };
    (0..).zip(resources.lines()).filter_map(bar).collect()
}

/// Reads no more than is wanted: the rest of a configuration space can be slow, or wake a device.
fn first_bytes(path: &Path, length: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(length).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_image::Device as PciDevice;

    #[test]
    fn resources_have_the_kernel_s_numbers() {
        let text = "0x00000000febc0000 0x00000000febdffff 0x0000000000040200\n\
                    0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                    0x000000000000c000 0x000000000000c01f 0x0000000000040101\n";
        let memory = Bar { number: 0, start: 0xFEBC_0000, length: 0x2_0000, flags: 0x4_0200 };
        let ports = Bar { number: 2, start: 0xC000, length: 0x20, flags: 0x4_0101 };
        assert_eq!(bars(text), [memory, ports]);
        assert_eq!(bars("0x10 0x0 0x200\n0 0xffffffffffffffff 0x200\nnonsense\n"), []);
    }

    #[test]
    fn rates_of_timers_are_found_in_the_kernel_s_list() {
        let device = |name: &str, mult: u64, shift: u32| {
            format!(
                "Tick Device: mode:     1\nPer CPU device: 0\nClock Event Device: {name}\n \
                 max_delta_ns:   343597383680\n mult:           {mult}\n shift:          {shift}\n mode: 3\n"
            )
        };
        let list = device("hpet", 61_496_115, 32) + &device("lapic", 26_843_546, 32);
        assert_eq!(rate(&list, "hpet"), Some(14_318_180));
        assert_eq!(rate(&list, "lapic"), Some(6_250_000), "100 MHz, divided by 16");
        let list = device("lapic-deadline", 4_294_967, 10);
        assert_eq!((rate(&list, "lapic"), rate(&list, "hpet")), (None, None));
        for (mult, shift) in [(0, 32), (u64::MAX, 0), (5, 200)] {
            assert_eq!(rate(&device("hpet", mult, shift), "hpet"), None);
        }
    }

    #[test]
    fn the_time_is_noted_for_a_machine_with_clocks() {
        let mut machine = Machine { timers: Some(Timers::default()), ..Machine::default() };
        let before = now().as_millis() as u64;
        note_time(&mut machine);
        let noted = machine.timers.expect("clocks").real_ms;
        assert!((before..before + 60_000).contains(&noted), "{noted}");
    }

    #[test]
    fn the_rtc_of_a_pc_is_compared_with_the_machine_s_time() {
        let root = tempfile::tempdir().expect("a folder");
        let ahead = |seconds| rtc_ahead_ms(&Sysroot::at(root.path()), Duration::from_secs(seconds));
        assert_eq!(ahead(1000), 0);
        for (clock, name, since_epoch) in [("rtc0", "other", "5"), ("rtc1", "rtc_cmos 00:03\n", "8200\n")] {
            let folder = root.path().join("sys/class/rtc").join(clock);
            std::fs::create_dir_all(&folder).expect("a folder");
            std::fs::write(folder.join("name"), name).expect("a file");
            std::fs::write(folder.join("since_epoch"), since_epoch).expect("a file");
        }
        assert_eq!([1000, 8200, 8201, 8202].map(ahead), [7_200_000, 0, 0, -2000]);
    }

    #[test]
    fn bridges_and_disks_have_more_of_their_configuration() {
        let root = tempfile::tempdir().expect("a folder");
        let device = |address: &str, class: &str| PciDevice {
            address: address.into(),
            class: class.into(),
            ..PciDevice::default()
        };
        let devices = ["060400", "020000", "010802", "010601"]
            .map(|class| device(&format!("0000:00:0{}.{}", &class[1..2], &class[3..4]), class));
        let devices = [devices.as_slice(), &[device("gone", "")]].concat();
        for device in &devices[..4] {
            let folder = root.path().join("sys/bus/pci/devices").join(&device.address);
            std::fs::create_dir_all(&folder).expect("a folder");
            std::fs::write(folder.join("config"), [9; 4096]).expect("a file");
        }
        let mut machine = Machine { devices, ..Machine::default() };
        add_resources(&mut machine, &Sysroot::at(root.path()));
        let lengths: Vec<_> = machine.devices.iter().map(|device| device.config.len()).collect();
        assert_eq!(lengths, [256, 64, 256, 256, 0]);
    }
}
