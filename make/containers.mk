# Containers of docker-compose.yml, beside `make up` and `make down`.

# What compose gives containers of the checkout, whose users are nobody on this machine.
MOUNTED := config/millrace.toml k8s/base/envoy.sh k8s/components/second-model/millrace.toml \
	observability/collector/config.yaml observability/jaeger/config.yaml observability/prometheus/prometheus.yml \
	observability/prometheus/alerts.yml observability/grafana/provisioning observability/grafana/dashboards

.PHONY: mounted
mounted: ## Let containers read what compose gives them of this checkout, as after a clone with umask 077
	@closed=$$(find $(MOUNTED) \( -type d ! -perm -005 \) -o \( -type f ! -perm -004 \)); \
	[ -z "$$closed" ] || { echo "opened to containers' users (chmod a+rX):" $$closed; chmod -R a+rX $(MOUNTED); }

.PHONY: roll
roll: ## Replace gateways and engines by the images that were built since, one container at a time
	docker compose build
	for service in engine gateway; do services/roll.sh $$service; done

.PHONY: certificates
certificates: ## Make an authority and a certificate for localhost, for TLS on this machine
	sh services/envoy/make-certificates.sh certificates
