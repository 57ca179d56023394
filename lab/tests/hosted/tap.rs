//! An interface of the host (`--net tap=`), in a network of its own, which takes no rights on the
//! host.

use super::*;

/// A script that makes a network with an interface, and starts a machine in it. `/sys` shows the
/// network in which it was mounted.
const IN_A_NETWORK: &str = "set -e
    mount -t sysfs sysfs /sys
    ip link set lo up
    ip tuntap add mercury0 mode tap
    ip link set mercury0 mtu 9000
    ip address add 10.77.0.1/24 dev mercury0
    ip link set mercury0 up
    exec \"$@\"";
/// A script that sends the first argument's file to the guest's server, and writes the answer to
/// the second one's.
const EXCHANGE: &str = "exec 3<>/dev/tcp/10.77.0.2/8080; cat \"$0\" >&3 & cat <&3 > \"$1\"; wait";

/// Pings from both ends, and sends some megabytes there and back.
#[test]
#[ignore = "long"]
fn a_network_card_is_an_interface_of_the_host_s() -> Result<()> {
    const LENGTH: usize = 16 << 20;
    let place = Place::new("tap")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    let mut bytes = vec![0; LENGTH];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).expect("bytes");
    let sent = place.file("sent", &bytes);
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--net", "--mount", "sh", "-c", IN_A_NETWORK, "sh"]).arg(&place.command);
    command.args(["hosted", "run", "--kernel"]).arg(&place.kernel).arg("--disk").arg(&disk);
    command.args(["--memory", "512", "--net", "tap=mercury0", "--append", "root=/dev/vda rw init=/bin/sh"]);
    let mut machine = Machine::start(&place, &mut command);
    machine.wait_for("Run /bin/sh as init");
    machine.type_line(SHELL);
    machine.wait_for("ready\n");
    machine.type_line(
        "ip address add 10.77.0.2/24 dev eth0; ip link set eth0 up; cat /sys/class/net/eth0/mtu; \
         ping -n -c 3 -W 20 10.77.0.1; ping -n -c 3 -W 20 -s 8000 -M do 10.77.0.1; echo pin''ged",
    );
    machine.wait_for("pinged\n");
    let said = machine.said();
    assert!(
        said.contains("9000\n") && said.matches("3 packets transmitted, 3 received").count() == 2,
        "{said}"
    );
    machine.type_line(&format!(
        "python3 -c 'import socket; l = socket.create_server((\"\", 8080)); print(\"list\" + \"ening\", \
         flush=True); s = l.accept()[0]; b = s.makefile(\"rb\").read({LENGTH}); s.sendall(b); s.close()'; \
         echo se''nt"
    ));
    machine.wait_for("listening\n");
    let returned = place.directory.join("returned");
    let mut exchange = Command::new("nsenter");
    exchange.args(["--target", &machine.child.id().to_string(), "--user", "--net", "--preserve-credentials"]);
    exchange.args(["timeout", "200", "bash", "-c", EXCHANGE]).arg(&sent).arg(&returned);
    let exchanged = exchange.output().expect("nsenter");
    assert!(exchanged.status.success(), "{exchanged:?}\n{}", machine.said());
    let back = fs::read(&returned).expect("what came back");
    assert!(back == bytes, "{} bytes came back\n{}", back.len(), machine.said());
    machine.wait_for("sent\n");
    machine.type_line("mount -o remount,ro /dev/vda /; poweroff -f");
    assert_well(&machine.end(HALTED));
    Ok(())
}
