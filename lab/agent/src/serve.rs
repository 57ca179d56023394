//! The agent's service: it passes requests from the port to jobs, and events of jobs to the port.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use mercury_lab_agent::{
    PORT_NAME,
    protocol::{Event, Hello, Receiver, Request, VERSION, send},
};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};

use crate::{Result, cmdline::Cmdline, environment, jobs::Jobs};

/// Interval between two attempts to find the port, or the host's return.
const RETRY: Duration = Duration::from_millis(20);

/// The connection to the host, shared by all jobs.
#[derive(Clone)]
pub struct Host(Arc<Mutex<File>>);

impl Host {
    /// Sends an event to the host. An absent host gets the event when it comes back.
    pub fn tell(&self, event: &Event) {
        let mut port = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = send(&mut *port, event) {
            eprintln!("mercury-lab-agent: {error}");
        }
    }
}

/// Serves the host for ever.
pub fn run() -> Result<()> {
    let port = open_port();
    let host = Host(Arc::new(Mutex::new(port.try_clone()?)));
    let mut requests = Receiver::new(port);
    let mut jobs = Jobs::new(host.clone());
    host.tell(&hello());
    loop {
        match requests.receive()? {
            Some(Request::Hello) => host.tell(&hello()),
            Some(request) => jobs.take(request),
            // The host has closed its end and may open it again.
            None => thread::sleep(RETRY),
        }
    }
}

/// Opens the port as soon as it exists, since its driver may still be loading. `lab.port` names a
/// serial port where the machine has no other.
fn open_port() -> File {
    let serial = Cmdline::read().get("port").map(|name| Path::new("/dev").join(name));
    loop {
        let path = serial.clone().or_else(find_port);
        match path.and_then(|path| File::options().read(true).write(true).open(path).ok()) {
            Some(port) => return if serial.is_some() { raw(port) } else { port },
            None => thread::sleep(RETRY),
        }
    }
}

/// Sets up a serial port to pass bytes on unchanged, at the highest speed of a PC's port.
fn raw(port: File) -> File {
    if let Ok(mut settings) = tcgetattr(&port) {
        settings.make_raw();
        let _ = settings.set_speed(115_200);
        let _ = tcsetattr(&port, OptionalActions::Now, &settings);
    }
    port
}

fn find_port() -> Option<PathBuf> {
    let ours =
        |name: &Path| fs::read_to_string(name.join("name")).is_ok_and(|name| name.trim_end() == PORT_NAME);
    let ports = fs::read_dir("/sys/class/virtio-ports").ok()?;
    let port = ports.flatten().find(|port| ours(&port.path()))?;
    Some(Path::new("/dev").join(port.file_name()))
}

fn hello() -> Event {
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    Event::Hello(Hello {
        version: VERSION,
        kernel: environment::kernel_release(),
        boot_id: boot_id.trim_end().to_owned(),
    })
}
