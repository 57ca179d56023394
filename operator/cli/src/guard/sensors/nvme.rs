//! The health log of NVMe controllers (NVM Express Base Specification 2.0, 5.16.1.3), by an ioctl of the
//! kernel's driver. No program is needed.

use super::{Amount, Reading, rules::Signal};
use mercury_control::sysroot::Sysroot;
use mercury_quiesce::nvme;
use std::{fs::File, io};

/// Bytes of the log.
const BYTES: usize = 512;
/// Command Get Log Page, and the page with the health.
const GET_LOG_PAGE: u8 = 0x02;
const HEALTH: u32 = 0x02;
/// All namespaces: the controller itself.
const CONTROLLER: u32 = u32::MAX;
/// Bits of the critical warning: too hot or too cold; the others are failures.
const TEMPERATURE: u8 = 1 << 1;
const FAILURES: u8 = 0b0011_1101;

/// Returns the names of the controllers.
pub(super) fn controllers(sysroot: &Sysroot) -> Vec<String> {
    sysroot.names("sys/class/nvme").into_iter().filter(|name| name.starts_with("nvme")).collect()
}

/// Reads the health of a controller.
///
/// # Errors
///
/// Returns an error if the controller does not answer.
pub(super) fn read(sysroot: &Sysroot, name: &str) -> io::Result<Vec<Reading>> {
    let text = |file: &str| sysroot.text(&format!("sys/class/nvme/{name}/{file}")).unwrap_or_default();
    let state = text("state");
    // A controller that is being reset would be waited for.
    if !state.is_empty() && state != "live" {
        return Err(io::Error::other(format!("{name} is {state}")));
    }
    let controller = File::open(sysroot.path(&format!("dev/{name}")))?;
    let (mut log, dwords) = ([0; BYTES], BYTES as u32 / 4);
    nvme::ask(&controller, GET_LOG_PAGE, CONTROLLER, HEALTH | (dwords - 1) << 16, &mut log)?;
    Ok(readings(name, &text("model"), &text("serial"), &log))
}

/// Returns the readings in a health log.
#[must_use]
pub fn readings(name: &str, model: &str, serial: &str, log: &[u8; BYTES]) -> Vec<Reading> {
    let part = format!("{name} ({model} {serial})");
    // Controllers of one subsystem share its serial number.
    let source = |kind: &str| format!("{name} {serial}/{kind}");
    let (warning, spare, least, used) = (log[0], log[3], log[4], log[5]);
    let hot = Amount::Alarm(warning & TEMPERATURE != 0);
    let kelvin = i32::from(u16::from_le_bytes([log[1], log[2]]));
    let text = format!("{part} is outside of its temperatures, now {} °C", kelvin - 273);
    let mut readings = vec![Reading::new(Signal::Temperature, source("temperature"), hot, text)];
    if warning & FAILURES != 0 {
        let text = format!(
            "{part} reports that it is failing: warning {warning:#x}, spare {spare} % (least {least} %), \
             {used} % used"
        );
        readings.push(Reading::new(Signal::DiskFailing, source("status"), Amount::New(1), text));
    }
    // 16 bytes; no disk has had more than fit in 8.
    let errors = log[160..168].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    let text = format!("{part}: media errors");
    readings.push(Reading::new(Signal::DiskErrors, source("media"), Amount::Level(errors), text));
    readings
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Fake, amount};
    use super::*;

    #[test]
    fn a_health_log_is_understood() {
        let mut log = [0; BYTES];
        log[1..3].copy_from_slice(&331_u16.to_le_bytes());
        (log[3], log[4], log[5]) = (100, 10, 3);
        log[160..164].copy_from_slice(&0x0102_0304_u32.to_le_bytes());
        let found = readings("nvme0", "Q", "S", &log);
        assert_eq!(amount(&found, Signal::Temperature, "nvme0 S/temperature"), Some(Amount::Alarm(false)));
        assert_eq!(amount(&found, Signal::DiskErrors, "nvme0 S/media"), Some(Amount::Level(0x0102_0304)));
        assert_eq!(found.len(), 2);
        let other = readings("nvme1", "Q", "S", &log);
        assert!(found.iter().all(|one| other.iter().all(|two| one.source != two.source)), "{other:?}");
        assert!(found[0].text.ends_with("now 58 °C"), "{}", found[0].text);
        // The persistent memory region alone.
        log[0] = 1 << 5;
        assert_eq!(
            amount(&readings("nvme0", "Q", "S", &log), Signal::DiskFailing, "nvme0 S/status"),
            Some(Amount::New(1))
        );
        log[0] = 0b11;
        let found = readings("nvme0", "Q", "S", &log);
        assert_eq!(amount(&found, Signal::Temperature, "nvme0 S/temperature"), Some(Amount::Alarm(true)));
        assert_eq!(amount(&found, Signal::DiskFailing, "nvme0 S/status"), Some(Amount::New(1)));
    }

    #[test]
    fn a_controller_that_is_not_live_is_left_alone() {
        let fake = Fake::new();
        fake.put("sys/class/nvme/nvme0/state", "resetting\n");
        assert_eq!(controllers(&fake.sysroot()), ["nvme0"]);
        let error = read(&fake.sysroot(), "nvme0").expect_err("not live");
        assert!(error.to_string().contains("resetting"), "{error}");
        // A file that is no controller refuses the command.
        fake.put("sys/class/nvme/nvme0/state", "live\n");
        fake.put("dev/nvme0", "");
        assert!(read(&fake.sysroot(), "nvme0").is_err());
    }
}
