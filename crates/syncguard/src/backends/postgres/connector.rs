//! Opens connections to the first host that answers, with a timeout for each host.

use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio_postgres::config::{Host, LoadBalanceHosts};
use tokio_postgres::{Client, Config};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::config::PostgresConfig;
use super::driver::Driver;
use super::{error, tls, transaction};
use crate::common::backoff::random_fraction;
use crate::common::error::{Error, Result};

/// Opens connections.
pub(super) struct Connector {
    config: PostgresConfig,
    tls: MakeRustlsConnect,
    targets: Vec<HostAddress>,
    /// The index of the host that answered last. The next connection begins with it, so that only
    /// the first one waits for a host that does not answer.
    last_host: AtomicUsize,
}

/// One of the configured hosts.
struct HostAddress {
    /// Also the name that its certificate must match.
    host: Option<Host>,
    address: Option<IpAddr>,
    port: u16,
}

/// How many addresses of one name are tried at most.
const MOST_ADDRESSES: usize = 8;

impl Connector {
    pub(super) fn new(config: PostgresConfig) -> Result<Self> {
        let tls = tls::connector(config.ssl_mode, &config.files)?;
        // With the caller's own pool, no connection is opened here.
        let targets = if config.pool.is_some() { Vec::new() } else { targets(&config.driver)? };
        Ok(Self { config, tls, targets, last_host: AtomicUsize::new(0) })
    }

    pub(super) fn max_connection_age(&self) -> Duration {
        self.config.max_connection_age
    }

    /// Begins with the first host again, because the one that answered last is not the right one.
    pub(super) fn forget_host(&self) {
        self.last_host.store(0, Ordering::Relaxed);
    }

    /// Opens a connection and returns the client and its driver, which must be polled. The session
    /// has our settings, unless a pooler shares it with other clients. Returns `None` if a pooler
    /// refuses the settings.
    ///
    /// Each host, and each address of a name, gets its own connect timeout. The error is that of
    /// the last one.
    pub(super) async fn open(&self, is_pooled: bool) -> Result<Option<(Client, Driver)>> {
        let mut last_error = Error::invalid("no PostgreSQL host is configured");
        for place in self.order() {
            let target = &self.targets[place];
            let addresses = match self.addresses(target).await {
                Ok(addresses) => addresses,
                Err(error) => {
                    last_error = error;
                    continue;
                }
            };
            for address in addresses {
                let config = self.config_of(target, address, is_pooled);
                match self.open_one(&config, is_pooled).await {
                    Ok(opened) => {
                        self.last_host.store(place, Ordering::Relaxed);
                        return Ok(opened);
                    }
                    Err(error) => last_error = error,
                }
            }
        }
        Err(last_error)
    }

    /// Returns the indexes of the hosts, in the order in which they are tried.
    fn order(&self) -> Vec<usize> {
        let mut places: Vec<usize> = (0..self.targets.len()).collect();
        if self.config.driver.get_load_balance_hosts() == LoadBalanceHosts::Random {
            places.sort_by_cached_key(|_place| random_fraction().to_bits());
        } else {
            let last = self.last_host.load(Ordering::Relaxed);
            places.sort_by_key(|place| *place != last);
        }
        places
    }

    /// Returns the addresses of a host; for a socket, one entry that is `None`.
    async fn addresses(&self, target: &HostAddress) -> Result<Vec<Option<IpAddr>>> {
        let name = match (&target.host, target.address) {
            (Some(Host::Tcp(name)), None) => name.as_str(),
            (_, address) => return Ok(vec![address]),
        };
        let looking = tokio::net::lookup_host((name, target.port));
        match tokio::time::timeout(self.config.network.connect_timeout, looking).await {
            Ok(Ok(found)) => {
                let mut found: Vec<_> = found.map(|address| Some(address.ip())).collect();
                found.dedup();
                found.truncate(MOST_ADDRESSES);
                Ok(found)
            }
            // The cause contains the name of the host.
            Ok(Err(_cause)) => Err(error::unknown_host()),
            Err(_elapsed) => Err(error::timeout().without_effect()),
        }
    }

    async fn open_one(&self, config: &Config, is_pooled: bool) -> Result<Option<(Client, Driver)>> {
        let connecting = config.connect(self.tls.clone());
        let connected = match tokio::time::timeout(self.config.network.connect_timeout, connecting)
            .await
        {
            Ok(Ok(connected)) => connected,
            Ok(Err(cause)) if !is_pooled && error::is_refused_setting(&cause) => return Ok(None),
            Ok(Err(cause)) if !is_pooled && error::is_unknown_setting(&cause) => {
                return Err(error::unknown_setting());
            }
            Ok(Err(cause)) => return Err(error::map(&cause).without_effect()),
            Err(_elapsed) => return Err(error::timeout().without_effect()),
        };
        refuse_an_old_server(connected.1.parameter("server_version"))?;
        Ok(Some(connected))
    }

    /// Returns the driver's configuration for one address of one host.
    fn config_of(&self, target: &HostAddress, address: Option<IpAddr>, is_pooled: bool) -> Config {
        let all = &self.config.driver;
        let mut config = Config::new();
        match &target.host {
            Some(Host::Tcp(name)) => {
                config.host(name);
            }
            #[cfg(unix)]
            Some(Host::Unix(path)) => {
                config.host_path(path);
            }
            None => {}
        }
        if let Some(address) = address {
            config.hostaddr(address);
        }
        config.port(target.port);
        if let Some(user) = all.get_user() {
            config.user(user);
        }
        if let Some(password) = all.get_password() {
            config.password(password);
        }
        if let Some(database) = all.get_dbname() {
            config.dbname(database);
        }
        config.application_name(all.get_application_name().unwrap_or("syncguard"));
        let mut options = all.get_options().unwrap_or_default().to_owned();
        if !is_pooled {
            options.push(' ');
            options += &transaction::session_options(self.config.network.response_timeout);
        }
        if !options.is_empty() {
            config.options(options);
        }
        if let Some(timeout) = all.get_tcp_user_timeout() {
            config.tcp_user_timeout(*timeout);
        }
        if let Some(interval) = all.get_keepalives_interval() {
            config.keepalives_interval(interval);
        }
        if let Some(retries) = all.get_keepalives_retries() {
            config.keepalives_retries(retries);
        }
        config
            .keepalives(all.get_keepalives())
            .keepalives_idle(all.get_keepalives_idle())
            .ssl_mode(self.config.ssl_mode.of_driver())
            .ssl_negotiation(all.get_ssl_negotiation())
            .target_session_attrs(all.get_target_session_attrs())
            .channel_binding(all.get_channel_binding());
        config
    }
}

/// Returns the hosts of a configuration, each with its address and port as far as they are given.
fn targets(config: &Config) -> Result<Vec<HostAddress>> {
    const DEFAULT_PORT: u16 = 5432;
    let (hosts, addresses) = (config.get_hosts(), config.get_hostaddrs());
    let (ports, count) = (config.get_ports(), hosts.len().max(addresses.len()));
    if count == 0 {
        return Err(Error::invalid("no PostgreSQL host is configured"));
    }
    let fits = |given: usize| given == 0 || given == count;
    if !fits(hosts.len()) || !fits(addresses.len()) || (ports.len() > 1 && !fits(ports.len())) {
        return Err(Error::invalid(
            "host, hostaddr and port must list the same number of PostgreSQL servers",
        ));
    }
    let target = |place: usize| HostAddress {
        host: hosts.get(place).cloned(),
        address: addresses.get(place).copied(),
        port: ports.get(place).or(ports.first()).copied().unwrap_or(DEFAULT_PORT),
    };
    Ok((0..count).map(target).collect())
}

/// The first version that has `MATERIALIZED`, for the statements, and `plan_cache_mode`, for the
/// sessions.
const OLDEST: u32 = 12;

fn refuse_an_old_server(version: Option<&str>) -> Result<()> {
    let major = version.and_then(|version| {
        version.split(|letter: char| !letter.is_ascii_digit()).next()?.parse::<u32>().ok()
    });
    match major {
        Some(major) if major < OLDEST => Err(error::too_old()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_addresses_and_ports_are_matched_by_position() {
        let parsed = |text: &str| targets(&text.parse::<Config>().expect("valid"));
        let two = parsed("host=a,b hostaddr=10.0.0.1,10.0.0.2 port=1,2").expect("valid");
        assert_eq!(two.len(), 2);
        assert_eq!((two[1].address, two[1].port), ("10.0.0.2".parse().ok(), 2));
        assert_eq!(two[1].host, Some(Host::Tcp("b".to_owned())));
        let one_port = parsed("host=a,b port=7").expect("valid");
        assert_eq!([one_port[0].port, one_port[1].port], [7, 7]);
        assert_eq!(parsed("hostaddr=10.0.0.1").expect("valid")[0].port, 5432);
        for bad in ["user=x", "host=a,b hostaddr=10.0.0.1", "host=a,b port=1,2,3"] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
    }
}
