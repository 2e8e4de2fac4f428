# What a release consists of: images of others, bills of materials, wheels and images.

# Tag of the images, as docker-compose.yml builds them.
IMAGE_TAG ?= $(or $(MILLRACE_TAG),0.1.0)

.PHONY: image-ages
image-ages: $(VENV)/.installed ## Name the images of others that nobody has looked at for too long
	$(BIN)/python -m services.third_party_images

.PHONY: image-digests
image-digests: $(VENV)/.installed ## Pin the images of others by the digests that their registries tell, by Docker
	$(BIN)/python -m services.image_digests

.PHONY: sbom
sbom: dev ## Write what each image holds to build/sbom (CycloneDX); with Docker, Debian's packages as well
	MILLRACE_TAG=$(IMAGE_TAG) services/bills.sh build/sbom

.PHONY: client
client: dev ## The wheel millrace-client, of the stubs and a thin client, in build/client
	cd client && $(CURDIR)/$(BIN)/python -m hatchling build --target wheel --directory $(CURDIR)/build/client

.PHONY: release
release: dev ## Wheels, images, bills of materials and sums in build/release; RELEASE_KEY=... (OpenSSH) signs
	RELEASE_KEY='$(RELEASE_KEY)' services/release.sh build/release
